# Sourced by the other scripts: make the environment if it is missing or out of date.
#
#   VENV     where it lives (default: .venv in the repository)
#   PYTHON   which interpreter makes it (default: the first 3.11 or 3.12 that is found)
#
# Afterwards `python` and `torchrun` are the environment's. Nothing is asked, no account needed.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
VENV=${VENV:-$repo/.venv}

say() { printf '%s\n' "$*" >&2; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" || { say "PYTHON=$PYTHON: not found"; return 1; }
        return
    fi
    local name
    # Some pins have no wheel for others: torch 2.15 needs 3.11, numpy 1.26 (learn2learn's) ends at 3.12.
    for name in python3 python3.11 python3.12 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    say "no Python 3.11 or 3.12 with venv found; install one (Debian: apt install python3-venv) or set PYTHON"
    return 1
}

make_environment() {
    local wanted stamp=$VENV/.requirements python
    wanted=$(cat requirements.txt)
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || return 1
    say "environment: installing requirements.txt into $VENV with $("$python" --version): about 3 minutes, 6 GB"
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" || return 1
    # Quiet, but never silent: a line every few seconds says that it lives.
    local log=$VENV/install.log began=$SECONDS
    "$VENV/bin/python" -m pip install --disable-pip-version-check -r requirements.txt >"$log" 2>&1 &
    local pip=$!
    trap 'kill $pip 2>/dev/null' EXIT
    while kill -0 $pip 2>/dev/null; do
        sleep 2
        if [ $(((SECONDS - began) % 10)) -lt 2 ]; then
            say "  $((SECONDS - began)) s: $(grep -E '^(Collecting|Downloading|Building|Installing)' "$log" | tail -n 1 | cut -c 1-100)"
        fi
    done
    trap - EXIT
    if ! wait $pip; then
        tail -n 20 "$log" >&2
        say "the installation failed; the whole log is $log, and the same command tries again"
        return 1
    fi
    printf '%s' "$wanted" >"$stamp"
    say "environment: ready after $((SECONDS - began)) s"
}

make_environment || exit 1
PATH=$VENV/bin:$PATH
