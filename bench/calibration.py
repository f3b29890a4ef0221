"""Code of the standard library whose instructions stand for the interpreter that is installed.

A request's instructions are told as a ratio to a round's, so that a budget holds where Python was built otherwise.
"""

from __future__ import annotations

import argparse
import configparser
import copy
import difflib
import email
import inspect
import logging
import pprint
import shlex
import statistics
import string
import textwrap
import urllib.parse
from fractions import Fraction

_MAIL = "From: a@b.c\nTo: d@e.f\nSubject: =?utf-8?q?caf=C3=A9?= list\nContent-Type: text/plain\n\nbody text\n"
_SETTINGS = "[a]\nx = 1\ny = two\n[b]\nz = %(q)s three\nq = 4\n"
_URL = "http://host:80/path;x?q=1&r=%20two#f"
_WORDS = "some words that have to be wrapped into lines of thirty characters each"


def calibrate() -> None:
    """One round."""
    _read()
    _write()


def _read() -> None:
    message = email.message_from_string(_MAIL)
    str(message["subject"])
    message.as_string()
    settings = configparser.ConfigParser()
    settings.read_string(_SETTINGS)
    settings.get("b", "z")
    shlex.split("run --with 'quoted words' and \"others\" here")
    urllib.parse.parse_qsl(urllib.parse.urlsplit(_URL).query)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--n", type=int, default=1)
    parser.parse_args(["--n", "3"])


def _write() -> None:
    textwrap.fill(_WORDS, 30)
    string.Template("$a and ${b}").substitute(a=1, b=2)
    record = logging.LogRecord("a", logging.INFO, "f", 1, "hello %s", ("x",), None)
    logging.Formatter("%(asctime)s %(message)s").format(record)
    third = Fraction(3, 7)
    third = third * third + Fraction(1, 3) - third
    copy.deepcopy({"a": [1, 2, {"b": (3, 4)}], "c": "d"})
    urllib.parse.quote("a b/ü")
    inspect.signature(textwrap.fill)
    pprint.pformat({"k": list(range(8))})
    statistics.median([3, 1, 2])
    difflib.SequenceMatcher(None, "abcd", "bcde").ratio()
