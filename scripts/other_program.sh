# Sourced by checks against other programs. `python` is ours, `home` a folder that goes when the script ends, and `environment
# NAME PACKAGE UNFIT...` makes `theirs` once, an environment of that program's own in the user's cache: where packages are named
# as UNFIT for it, with the torch for CPUs that they were not built for.
python=${PYTHON:-.venv/bin/python}
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT

environment() {
    theirs=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/$1
    if [ ! -e "$theirs/.installed" ]; then
        echo "installing $2 into $theirs (minutes, once) ..."
        rm -rf "$theirs"
        python3.11 -m venv "$theirs"
        "$theirs/bin/pip" install --quiet --disable-pip-version-check -c <([ $# -lt 3 ] || echo "torch==2.13.0+cpu") "$2"
        [ $# -lt 3 ] || "$theirs/bin/pip" uninstall --quiet --yes "${@:3}"  # built for another torch: the import would fail
        touch "$theirs/.installed"
    fi
    export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
}
