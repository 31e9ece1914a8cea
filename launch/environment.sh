# Sourced by the other scripts: find the environment, make it where it is missing, bring it up to date.
#
#   VENV     where it lives (default: the activated one if it lacks nothing, else .venv in the repository)
#   PYTHON   which interpreter makes it (default: the first of 3.11 to 3.14 that is found)
#
# One of your own (by venv or conda, activated or named by VENV) is used if it has all packages, and
# never changed. One that was made here is updated in place when requirements.txt changes; it is made
# again from the start only if its Python is another now, it was moved, or it never was whole.
#
# uv installs it: yours if it is on PATH (which brings a Python along where none fits), else one put
# into the environment. Where uv cannot be had, or fails, pip does it, three times slower.
# Afterwards `python` and `torchrun` are the environment's. Nothing is asked, no account needed.
#
# What sources it may set
#   lists         files whose packages are needed (default: pyproject.toml, what trains)
#   flags_of      the module whose flags, "$@", are checked before anything is installed
#   here          the folder that paths among these flags are relative to (default: the repository)

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
named=${VENV:-}
VENV=${VENV:-.venv}
case $VENV in /*) ;; *) VENV=$repo/$VENV ;; esac
# Written last, and emptied first: only an environment that was installed to the end has it whole.
stamp=$VENV/.requirements
log=$VENV/install.log

say() { printf '%s\n' "$*" >&2; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

supported() { case $1 in 3.1[1-4]) ;; *) return 1 ;; esac; }

# What the stamp of a whole environment says, given its Python's version. Programs in it name its folder.
whole_stamp() {
    cat requirements.txt
    maker_stamp "$1"
}

# Its last line, which stands alone while a whole environment is updated.
maker_stamp() { echo "# Python $1 in $VENV"; }

is_whole() {
    local version
    version=$(version_of "$VENV/bin/python") || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$version" ] || return 1
    [ "$(cat "$stamp" 2>/dev/null)" = "$(whole_stamp "$version")" ]
}

# Whether it was whole once, and only the requirements have changed since.
is_outdated() {
    local version
    version=$(version_of "$VENV/bin/python") || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$version" ] || return 1
    [ "$(tail -n 1 "$stamp" 2>/dev/null)" = "$(maker_stamp "$version")" ]
}

# Use an environment ($1) that is the user's own, if it lacks nothing; else return 1 and say what.
use_own() {
    local version lacking
    version=$(version_of "$1/bin/python") || return 1
    if ! supported "$version"; then
        say "environment: $1 has Python $version; 3.11 to 3.14 are supported"
        return 1
    fi
    # shellcheck disable=SC2086
    lacking=$("$1/bin/python" launch/lacking.py ${lists:-pyproject.toml}) || lacking="a Python that works"
    if [ -n "$lacking" ]; then
        say "environment: $1 is not used: it lacks $lacking"
        return 1
    fi
    say "environment: $1, your own"
    VENV=$1
}

# A wrong flag costs no installation. Nothing but Python is needed for it.
check_flags() {
    local python=$1 code=0
    shift
    [ -n "${flags_of:-}" ] && supported "$(version_of "$python")" || return 0
    # From where paths among them are meant.
    (cd "${here:-$repo}" && PYTHONPATH=$repo "$python" -m launch.flags_first "$flags_of" "$@") || code=$?
    case $code in
    2) exit 2 ;;
    3) exit 0 ;; # they asked for help, and have it
    esac
}

# Print the interpreter to use, or a range of versions for the user's uv ($1, perhaps empty).
find_python() {
    local uv=$1 name version
    if [ -n "${PYTHON:-}" ]; then
        version=$(version_of "$PYTHON") || { say "PYTHON=$PYTHON: no such Python"; return 1; }
        supported "$version" || { say "PYTHON=$PYTHON is Python $version: 3.11 to 3.14 are supported"; return 1; }
        command -v "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        supported "$(version_of "$name")" || continue
        # uv makes environments without these two, which Debian packs apart.
        [ -n "$uv" ] || "$name" -c 'import venv, ensurepip' 2>/dev/null || continue
        command -v "$name"
        return
    done
    if [ -n "$uv" ]; then
        echo ">=3.11,<3.15"
        return
    fi
    say "no Python 3.11 to 3.14 with venv found: install one (Debian: apt install python3-venv) or uv, or set PYTHON"
    return 1
}

# The two installers. $1: the user's uv, perhaps empty; $2: the interpreter.
install_with_uv() {
    local uv=$1 index
    if [ -n "$uv" ]; then
        "$uv" venv --allow-existing --python "$2" "$VENV" || return
    else
        uv=$VENV/bin/uv
        "$2" -m venv "$VENV" && "$VENV/bin/python" -m pip install --disable-pip-version-check uv==0.13.9 || return
        # uv does not read pip's settings: where pip is told another package index, tell uv.
        index=${PIP_INDEX_URL:-$("$VENV/bin/python" -m pip config get global.index-url 2>/dev/null)}
        [ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    fi
    echo "Installing with $("$uv" --version)"
    uv_install "$uv"
}

# $1: uv; then its flags.
uv_install() {
    local uv=$1
    shift
    # learn2learn on every Python, and our numpy whatever its dependency qpth asks for. uv takes the
    # setting on the command line only.
    sed -E 's/^(learn2learn[^ ]*).*/\1/' requirements.txt |
        "$uv" pip install --python "$VENV/bin/python" --requirements - "$@" \
            --overrides <(grep '^numpy' requirements.txt) --config-setting=--build-option=build_ext
}

# All but the stamp and the log; where VENV is a link to another disk, it stays one.
empty_environment() {
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name "${stamp##*/}" ! -name "${log##*/}" -exec rm -rf {} +
}

install_with_pip() {
    empty_environment
    "$2" -m venv "$VENV" &&
        "$VENV/bin/python" -m pip install --disable-pip-version-check -r requirements.txt
}

install() {
    echo "Creating $VENV"
    install_with_uv "$@" || { echo "Installing with pip, about 3 minutes, as uv did not"; install_with_pip "$@"; } || return
    finish
}

# Install what has changed, and leave the rest. $1: the user's uv, perhaps empty; $2: --reinstall where
# an update was cut off, as a package may be half there.
update() {
    local uv=${1:-$VENV/bin/uv} python=$VENV/bin/python again=${2:-}
    echo "Installing what has changed"
    uv_install "$uv" ${again:+"$again"} || {
        echo "Installing with pip, as uv did not"
        # uv makes environments without it.
        "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip || return
        "$python" -m pip install --disable-pip-version-check ${again:+--force-reinstall} -r requirements.txt
    } || return
    finish
}

finish() {
    # It works, and what many processes import is compiled to bytecode once (-I: whatever
    # PYTHONDONTWRITEBYTECODE says), in two processes, as half of it is waiting for a cold disk. All
    # packages would take four times as long.
    echo "Importing torch for the first time"
    "$VENV/bin/python" -I -W ignore -c 'import torchvision, torchopt, torch._inductor.compile_fx' &
    "$VENV/bin/python" -I -W ignore -c 'import scipy.stats, matplotlib.pyplot, optuna, wandb, pytest' || return
    wait $! || return
    whole_stamp "$(version_of "$VENV/bin/python")" >"$stamp"
}

is_ours() { [ -e "$stamp" ] || [ -e "$log" ]; }

make_environment() {
    local uv python began=$SECONDS installer work active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [ -z "$named${PYTHON:-}" ] && [ -n "$active" ] && ! [ "$active" -ef "$VENV" ]; then
        use_own "$active" && return
    fi
    is_whole && return
    if [ -e "$VENV/bin/python" ] && ! is_ours && [ -z "${PYTHON:-}" ]; then
        use_own "$VENV" && return
    fi
    uv=$(command -v uv) && uv --version >/dev/null 2>&1 || uv=
    python=$(find_python "$uv") || return
    check_flags "$python" "$@"
    # One at a time makes it; the others wait, and so does one that follows a killed script whose
    # installer lives on. Without flock (macOS) nobody waits.
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "environment: another process is making $VENV: waiting"
        flock 9
        is_whole && return
    fi
    if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && ! is_ours; then
        say "$VENV was not made by this script: remove it, set VENV to another folder, or install what it lacks"
        return 1
    fi
    if is_outdated; then
        say "environment: requirements.txt has changed: updating $VENV in place"
        work=(update "$uv")
        [ "$(wc -l <"$stamp")" -gt 1 ] || work+=(--reinstall)
        maker_stamp "$(version_of "$VENV/bin/python")" >"$stamp"
    else
        # Nothing of it is mended: what never was whole is made again from the start.
        mkdir -p "$VENV" && : >"$stamp" && empty_environment || return
        say "environment: installing requirements.txt into $VENV with Python $(version_of "$python" || echo "$python"): about a minute, 6 GB"
        work=(install "$uv" "$python")
    fi
    # In a process group of its own, which is ended as one.
    set -m
    "${work[@]}" >"$log" 2>&1 </dev/null &
    installer=$!
    set +m
    trap 'kill -- -$installer 2>/dev/null' EXIT
    # Quiet, but never silent: a line every few seconds says that it lives.
    while kill -0 $installer 2>/dev/null; do
        sleep 1
        if [ $(((SECONDS - began) % 10)) -eq 9 ]; then
            say "  $((SECONDS - began)) s: $(grep -E '^ *(Creating|Collecting|Download|Buil|Installing|Resolved|Prepared|Installed|Importing)' "$log" | tail -n 1 | cut -c 1-100)"
        fi
    done
    trap - EXIT
    if ! wait $installer; then
        say "the installation failed: $(grep -iE 'error|failed|×' "$log" | tail -n 1 | cut -c 1-200); the whole log is $log, and the same command tries again"
        return 1
    fi
    say "environment: ready after $((SECONDS - began)) s"
}

make_environment "$@" 9<"$repo/requirements.txt" || exit 1
PATH=$VENV/bin:$PATH
