"""Makes a private authority for a cluster and the certificate that its NATS servers and clients show each other.

    millrace certs certs                    # then `tls = "certs"` under [nats] in the cluster's file
    millrace certs certs --host 10.0.0.7    # a further name or address under which NATS is reached
    millrace certs certs --renew            # a new certificate and key for the same names, for a year

A running cluster takes a renewed certificate within seconds, and no connection ends: nats-server reads it anew, clients
show it when they next connect. The authority is good for ten years; its key is needed for --renew only.
"""

from __future__ import annotations

import argparse
import ipaddress
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from millrace.actor.bus_tls import AUTHORITY, AUTHORITY_KEY, IDENTITY
from millrace.cli.errors import CliError
from millrace.files import replace_file

AUTHORITY_DAYS, IDENTITY_DAYS = 3650, 365

#: Under these names the NATS servers of `millrace up` are reached.
LOCAL = ("localhost", "127.0.0.1", "::1")

OPENSSL_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the files are, or will be")
    parser.add_argument("--renew", action="store_true", help="only the certificate; its authority stays")
    parser.add_argument("--host", action="append", default=[], help="further name or address of a NATS server")


def run(arguments: argparse.Namespace) -> int:
    """Makes the files; returns the exit code."""
    folder: Path = arguments.folder
    made = (folder / AUTHORITY).exists()
    if made and not arguments.renew:
        raise CliError(f"{folder / AUTHORITY} is there already; --renew makes another certificate of it")
    if arguments.renew and not (folder / AUTHORITY_KEY).is_file():
        raise CliError(f"no {folder / AUTHORITY_KEY}; a certificate is renewed where its authority's key is")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not made:
            certificate, key = _made(AUTHORITY_DAYS, "authority", _AUTHORITY)
            replace_file(folder / AUTHORITY_KEY, key, private=True)
            replace_file(folder / AUTHORITY, certificate)
        signed_by = ("-CA", str(folder / AUTHORITY), "-CAkey", str(folder / AUTHORITY_KEY))
        before = _read_names(folder / IDENTITY) if made else ""
        names = ",".join(filter(None, (before or _names(LOCAL), _names(arguments.host))))
        extensions = [*_IDENTITY, f"subjectAltName={names}"]
        certificate, key = _made(IDENTITY_DAYS, "bus", extensions, *signed_by)
        replace_file(folder / IDENTITY, certificate + key, private=True)
    except OSError as error:
        raise CliError(f"{folder}: {error.strerror or error}") from None
    print(f'{folder / IDENTITY} is good for {IDENTITY_DAYS} days; `tls = "{folder}"` under [nats] uses it')
    return 0


_AUTHORITY = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
_IDENTITY = (
    "basicConstraints=critical,CA:FALSE",
    "keyUsage=critical,digitalSignature",
    "extendedKeyUsage=serverAuth,clientAuth",
)


def _names(hosts: Iterable[str]) -> str:
    return ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts)


def _read_names(certificate: Path) -> str:
    """Names of a certificate, as openssl takes them; empty where it is gone."""
    if not certificate.exists():
        return ""
    said = _openssl("x509", "-in", str(certificate), "-noout", "-ext", "subjectAltName")
    return said.splitlines()[-1].strip().replace("IP Address:", "IP:").replace(", ", ",")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _made(days: int, name: str, extensions: Iterable[str], *signed_by: str) -> tuple[bytes, bytes]:
    """A certificate and its new key (PEM), signed by itself unless an authority is given."""
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder) / "certificate", Path(folder) / "key"
        words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        words += ["-days", str(days), "-subj", f"/O=millrace/CN={name}", *signed_by]
        words += [word for extension in extensions for word in ("-addext", extension)]
        _openssl(*words, "-keyout", str(key), "-out", str(certificate))
        return certificate.read_bytes(), key.read_bytes()


def _openssl(*words: str) -> str:
    """Run openssl; returns its output.

    Raises:
        CliError: it is not there, or refuses.
    """
    try:
        done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except FileNotFoundError:
        raise CliError("no program openssl (3.0 or newer), which makes the certificates") from None
    if done.returncode:
        raise CliError(f"openssl: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return done.stdout
