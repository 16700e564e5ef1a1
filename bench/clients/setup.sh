#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts here. They take URL MODEL TOKENIZER_DIR [MORE_OPTIONS…], install a client
# from the package index into build/clients, and run it against the server at URL. No client's code
# is in this project.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
clients=$root/build/clients
[ ! -d "$3" ] || set -- "$1" "$2" "$(realpath "$3")" "${@:4}"
export PATH=$PATH:$root/.venv/bin OPENAI_API_KEY=${OPENAI_API_KEY:-none}

# environment NAME PIP_ARGUMENT…: makes an environment of its own for a client.
environment() {
    [ -e "$clients/$1" ] || uv venv --quiet --python 3.11 "$clients/$1"
    uv pip install --quiet --python "$clients/$1" "${@:2}"
}

# source_of NAME VERSION FOLDER: unpacks a folder of a source distribution, and sets `source`.
source_of() {
    source=$clients/$1-$2/$3
    [ -e "$source" ] || python3 - "$@" "$clients" <<'PYTHON'
import hashlib, io, subprocess, sys, tarfile, tomllib, urllib.request

name, version, folder, to = sys.argv[1:]
lock = f"{to}/pylock.{name}.toml"
command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--no-binary", name]
command += ["--format", "pylock.toml", "--output-file", lock, "-"]
subprocess.run(command, input=f"{name}=={version}", text=True, check=True, stdout=sys.stderr)
with open(lock, "rb") as file:
    sdist = tomllib.load(file)["packages"][0]["sdist"]
data = urllib.request.urlopen(sdist["url"]).read()
if hashlib.sha256(data).hexdigest() != sdist["hashes"]["sha256"]:
    sys.exit(f"{name} {version}: the file has another hash than the index states")
with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    inside = [one for one in archive if one.name.startswith(f"{name}-{version}/{folder}/")]
    archive.extractall(to, inside, filter="data")
PYTHON
}
