# The other scripts source this file. It finds the environment, makes it, or brings it up to date.
#
#   VENV     its folder (default: the active environment if it is complete, else .venv here)
#   PYTHON   the Python that makes it (default: a Python 3.11 to 3.14 on PATH, or one from uv)
#
# uv installs the packages: your uv on PATH, else one that pip installs. If uv fails, pip does it,
# three times slower. The script changes only environments that it made.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
[ -z "${VENV:-}${PYTHON:-}" ] || active=
VENV=${VENV:-.venv}
case $VENV in /*) ;; *) VENV=$repo/$VENV ;; esac
# The stamp is emptied first and written last, so only a whole environment has a full stamp.
stamp=$VENV/.requirements log=$VENV/.install.log
whole_stamp() { cat requirements.txt requirements.lock && made_as; }
# The stamp's last line. It has the folder, because programs in the environment contain that path.
made_as() { "${PYTHON:-$VENV/bin/python}" -c 'import sys; print("# Python %d.%d in" % sys.version_info[:2], sys.argv[1])' "$VENV" 2>/dev/null; }
is_whole() { [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(whole_stamp)" ]; }

say() { printf '%s\n' "$*" >&2; }

# Use an environment that was not made here ($1) if it is complete; else say what is missing.
use_own() {
    local lacks pip=(-m pip --isolated --disable-pip-version-check install --dry-run --no-deps --no-index)
    # pip gets no package index (--no-index), so it succeeds only if all packages are installed.
    if ! lacks=$(PIP_CONFIG_FILE=/dev/null "$1/bin/python" "${pip[@]}" -r requirements.txt 2>&1); then
        say "environment: $1 is not used: ${lacks##*$'\n'}"
        return 1
    fi
    say "environment: $1, your own"
    VENV=$1
}

# Print the Python to use, or a range of versions for the user's uv.
find_python() {
    local name uses=sys
    [ -n "$uv" ] || uses="sys, venv, ensurepip" # Debian packs two of them apart
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        "$name" -c "import $uses; exit(not (3, 11) <= sys.version_info < (3, 15))" 2>/dev/null &&
            command -v "$name" && return
    done
    [ -n "$uv" ] && [ -z "${PYTHON:-}" ] && echo ">=3.11,<3.15" && return
    say "${PYTHON:+PYTHON=$PYTHON: }no Python 3.11 to 3.14 with venv: install one (Debian: apt install python3-venv) or uv, or set PYTHON"
    return 1
}

# $1: the Python of a new environment; empty: update the existing environment.
install() {
    local python=$VENV/bin/python index
    echo "Working on $VENV"
    if [ -n "$1" ]; then
        rm -rf "$VENV"/* # but its stamp and its log; VENV itself may be a link to another disk
        if [ -n "$uv" ]; then
            "$uv" venv --allow-existing --python "$1" "$VENV" || return
        else
            "$1" -m venv "$VENV" || return
            "$python" -m pip install uv==0.13.9 || echo "uv cannot be had"
        fi
    fi
    # uv does not read pip's settings, so pass a package index that is set for pip on to uv.
    index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null)} || :
    [ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    # sed: learn2learn on every Python, its setting on the command line. --overrides: our numpy.
    # --editable: this folder, so that the command maml and "import maml" work everywhere.
    sed -E 's/^(learn2learn[^ ]*).*/\1/' requirements.txt |
        "${uv:-$VENV/bin/uv}" pip install --python "$python" --requirements - --editable . --constraint requirements.lock \
            --overrides <(grep '^numpy' requirements.txt) --config-setting=--build-option=build_ext || {
        echo "Installing with pip, as uv did not"
        "$python" -m pip --version || "$python" -m ensurepip || return # uv leaves pip out
        "$python" -m pip install --requirement requirements.txt --editable . --constraint requirements.lock || return
    }
    echo "Importing torch for the first time" # does it work? And it is compiled to bytecode once
    "$python" -I -W ignore -c 'import torchvision, torchopt, torch._inductor.compile_fx, scipy.stats, wandb' &&
        whole_stamp >"$stamp"
}

make_environment() {
    local uv python began=$SECONDS installer
    [ -n "$active" ] && ! [ "$active" -ef "$VENV" ] && use_own "$active" && return
    is_whole && return
    # With flock, one process makes it. An installer that outlives a killed script keeps the lock.
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "environment: another process is making $VENV: waiting"
        flock 9
        is_whole && return
    fi
    if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && [ ! -e "$stamp" ]; then
        [ -e "$VENV/bin/python" ] && use_own "$VENV" && return
        say "$VENV was not made by this script: remove it, or set VENV to another folder"
        return 1
    fi
    uv=$(command -v uv) && uv --version >/dev/null 2>&1 || uv=
    python=$(find_python) || return
    if [ -e "$stamp" ] && [ "$(tail -n 1 "$stamp")" = "$(made_as)" ]; then
        python= && say "environment: the requirements have changed: updating $VENV in place"
    else
        say "environment: installing requirements.txt into $VENV with $python: about a minute, 6 GB"
    fi
    mkdir -p "$VENV" && : >"$stamp" || return
    set -m # in a process group of its own, which is ended as one
    install "$python" >"$log" 2>&1 </dev/null &
    installer=$!
    set +m
    trap 'kill -- -$installer 2>/dev/null' EXIT
    while kill -0 $installer 2>/dev/null; do
        sleep 1
        [ $(((SECONDS - began) % 10)) -ne 9 ] || say "  $((SECONDS - began)) s: $(grep . "$log" | tail -n 1 | cut -c 1-100)"
    done
    trap - EXIT
    if wait $installer; then
        say "environment: ready after $((SECONDS - began)) s"
    else
        say "the installation failed: $(grep -iE 'error|failed|×' "$log" | tail -n 1 | cut -c 1-200); the whole log is $log"
        return 1
    fi
}

make_environment 9<"$repo/requirements.txt" || exit 1
PATH=$VENV/bin:$PATH
