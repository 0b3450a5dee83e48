# scripts/demo: installs what is missing, then runs three epochs of training over a mount.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'USAGE'
usage: scripts/demo [--files COUNT]

Shows what Monarch does on this machine, in less than three minutes. Makes a small data set, puts it
behind a slow source, mounts it, trains three epochs, and shows for each epoch how many files were
read from the source. Installs missing packages (with apt as root or by sudo, and Python packages
into .venv) and leaves nothing else behind. It needs no root once fuse3, gcc, libfuse3-dev and
python3-venv are installed.

  --files COUNT   number of images (300)
  --help          print this text

examples:
  scripts/demo
  scripts/demo --files 1000
USAGE
}

for argument; do
    case $argument in
    -h | --help)
        usage
        exit 0
        ;;
    esac
done
ensure_apt "${SYSTEM_PACKAGES[@]}"
ensure_venv bench
ensure_torch || say "PyTorch could not be installed; the demo reads and decodes instead of training"
cd "$ROOT"
exec "$PYTHON" -m scripts.tools.demo "$@"
