"""Certificates of 127.0.0.1 for tests, by openssl."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    folder.mkdir(parents=True)
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certfile), "-keyout", str(keyfile)]
    subprocess.run([*words.split(), *names], check=True, capture_output=True, timeout=60)
    return certfile, keyfile
