#!/usr/bin/env bash
# Makes a base image from Debian's packages alone, for machines that reach no image registry: debootstrap, Python, this machine's
# certificates and its pip configuration (with the folders of wheels that it names). Prints the image's name.
#
#   compose/base_image.sh millrace-base:bookworm
set -euo pipefail
name=${1:?name of the image}
suite=${SUITE:-bookworm}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
need() { command -v "$1" >/dev/null || { echo "base_image: $1 is missing: apt-get install $1" >&2; exit 1; }; }
need debootstrap
need docker
if ! docker image inspect "$name-bare" >/dev/null 2>&1; then
  debootstrap --variant=minbase "$suite" "$work/root" >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; exit 1; }
  # What Debian's own images say too: no layer keeps the packages that it has installed.
  echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin"; };' >"$work/root/etc/apt/apt.conf.d/docker-clean"
  echo 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' >>"$work/root/etc/apt/apt.conf.d/docker-clean"
  rm -f "$work"/root/var/cache/apt/archives/*.deb
  tar -C "$work/root" -c . | docker import - "$name-bare" >/dev/null
fi
mkdir "$work/site"
cp -L /etc/ssl/certs/ca-certificates.crt "$work/site/ca.crt"
python3 - "$work/site" <<'PY'
# This machine's pip settings, with local folders copied beside them, so that an install in a container finds the same packages.
import configparser, os, shutil, subprocess, sys
from pathlib import Path
site = Path(sys.argv[1]); (site / "wheels").mkdir(); (site / "indexes").mkdir()
listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
values = dict(line.split("=", 1) for line in listing.splitlines() if "=" in line)
found = {key.split(".", 1)[1]: value.strip("'\"") for key, value in values.items() if key.startswith(("global.", ":env:"))}
links = [Path(p) for p in found.get("find-links", "").split() if p.startswith("/")]
for folder in filter(Path.is_dir, links):
    for wheel in folder.glob("*.whl"):
        shutil.copy(wheel, site / "wheels")
out = configparser.ConfigParser()
out["global"] = {"cert": "/etc/ssl/certs/ca-certificates.crt", "find-links": "/opt/site/wheels"}
for key in ("index-url", "timeout"):
    if key in found:
        out["global"][key] = found[key]
with (site / "pip.conf").open("w") as file:
    out.write(file)
PY
cat >"$work/Dockerfile" <<'DOCKER'
ARG BARE
FROM ${BARE}
COPY site /opt/site
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv ca-certificates >/dev/null \
    && rm -rf /var/lib/apt/lists/* \
    && cp /opt/site/ca.crt /etc/ssl/certs/ca-certificates.crt && cp /opt/site/pip.conf /etc/pip.conf
DOCKER
docker build -q --build-arg "BARE=$name-bare" -t "$name" "$work" >/dev/null
echo "$name"
