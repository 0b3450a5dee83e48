# Sourced by the launchers: installs what is missing, and takes no time when nothing is.
#
#   ensure_apt PACKAGE...      Debian packages; as root or by sudo, else it says what to install.
#                              The services of nginx, Slurm and munge are neither started nor enabled
#   make_venv                  an empty virtual environment
#   ensure_venv EXTRA...       a virtual environment with this checkout and the extras of pyproject.toml
#   ensure_torch               PyTorch, into the same environment
#   $ROOT, $VENV, $PYTHON      the checkout, its environment (MONARCH_VENV: another one) and its Python

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=$(realpath -ms "${MONARCH_VENV:-$ROOT/.venv}")
PYTHON=$VENV/bin/python

SYSTEM_PACKAGES=(fuse3 libfuse3-dev gcc pkg-config python3-dev python3-venv)
CLIENT_PACKAGES=(rsync git tar attr)
PATH=$PATH:/usr/sbin command -v nginx >/dev/null || CLIENT_PACKAGES+=(nginx-light)
# A Slurm that tests start themselves.
SLURM_PACKAGES=(slurmctld slurmd slurmdbd slurm-client munge iproute2 mariadb-server-core)

# Debian asks this program whether the installation of a package may start a service.
SERVICE_POLICY=/usr/sbin/policy-rc.d

# Run as root. The mount starts nginx itself, and its service would take port 80 of this machine.
# The tests start Slurm and munge in a namespace.
INSTALL='
policy=$1
shift
if [ ! -e "$policy" ]; then
    trap "rm -f \"\$policy\"" EXIT
    trap "exit 1" HUP INT TERM
    printf "%s\n" "#!/bin/sh" "case \${1%.service} in nginx|slurmctld|slurmd|slurmdbd|munge) exit 101 ;; esac" >"$policy"
    chmod 755 "$policy"
fi
# Configuration, not environment: sudo clears the environment.
apt="apt-get -q -o Dpkg::Use-Pty=0 -o APT::Install-Recommends=false -y"
$apt install "$@" || { $apt update && $apt install "$@"; } || exit 1
for service in nginx slurmctld slurmd slurmdbd munge; do
    case " $* " in *" $service "* | *" $service-light "*) update-rc.d "$service" disable ;; esac
done
'

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$(basename "$0"): $*"
    exit 1
}

ensure_apt() {
    local package missing=() sudo=()
    command -v dpkg-query >/dev/null || return 0
    for package; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            fail "these packages are missing; install them: sudo apt-get install ${missing[*]}"
        fi
        sudo=(sudo -n)
    fi
    say "installing ${missing[*]}"
    "${sudo[@]}" sh -c "$INSTALL" sh "$SERVICE_POLICY" "${missing[@]}" </dev/null >&2 ||
        fail "apt-get could not install ${missing[*]}"
}

make_venv() {
    [ -x "$PYTHON" ] && return 0
    say "making a virtual environment in $VENV"
    python3 -m venv "$VENV" || fail "python3 -m venv $VENV failed"
}

ensure_venv() {
    local extra extras sum missing='' stamp=$VENV/.monarch-installed
    extras=$(IFS=,; printf '%s' "$*")
    # What is compiled during the installation counts, too.
    sum=$(cat "$ROOT/pyproject.toml" "$ROOT"/monarch/fuse/native/*.[ch] | sha256sum | cut -d' ' -f1)
    for extra in none "$@"; do
        grep -qsxF -- "$extra $sum $ROOT" "$stamp" || missing=yes
    done
    [ "$missing" ] || [ ! -x "$PYTHON" ] || return 0
    make_venv
    say "installing monarch${extras:+[$extras]} into $VENV"
    # setuptools would keep an extension that is newer than its sources, whatever the flags. A
    # running daemon has the old file mapped, so the file is removed and not overwritten.
    rm -f "$ROOT"/monarch/fuse/_datapath.*.so "$ROOT"/monarch/datasets/_many.*.so
    "$PYTHON" -m pip install -q -e "$ROOT${extras:+[$extras]}" >&2 ||
        fail "pip could not install monarch${extras:+[$extras]}"
    for extra in none "$@"; do
        printf '%s %s %s\n' "$extra" "$sum" "$ROOT"
    done >>"$stamp"
}

ensure_torch() {
    "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' && return 0
    say "installing PyTorch"
    "$PYTHON" -m pip install -q torch==2.13.0 >&2
}
