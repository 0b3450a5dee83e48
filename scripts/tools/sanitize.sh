# scripts/sanitize: runs tests with the extensions compiled for AddressSanitizer and
# UndefinedBehaviorSanitizer, or for ThreadSanitizer. Any report of a sanitizer is a failure.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'USAGE'
usage: scripts/sanitize address|thread [--compile | PYTEST ARGUMENT...]

  address    memory errors and undefined behaviour
  thread     data races
  --compile  compile the extensions, and run no test
  --help     print this text

Without arguments for pytest a short choice of tests runs, in the modes that the datapath serves.
They run in a copy of the checkout. The extensions are kept in .cache, beside their sum. Tests that
compile or install Monarch themselves do not work here. MONARCH_VENV names a virtual environment in
place of .venv of the checkout.

examples:
  scripts/sanitize address
  scripts/sanitize thread tests/fuse/test_waiting.py -k killed
USAGE
}

case ${1:-} in
address)
    flags=(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
    libraries=(libasan.so libubsan.so)
    # A thread may hold a lock of its allocator while the process forks, and the new one waits for
    # it for ever (GCC 12).
    unfit=" or forked"
    ;;
thread)
    flags=(-fsanitize=thread)
    libraries=(libtsan.so)
    # One thread opens one file there, and no other could race with it.
    unfit=" or without_openat2"
    ;;
-h | --help)
    usage
    exit 0
    ;;
*)
    usage >&2
    exit 2
    ;;
esac
kind=$1
shift
# Frames of a sanitizer are larger than the stacks of musl, and some tests take ten seconds with
# one. scripts/test runs both kinds at once.
slow="whatever_the_buffer or no_more_stack or memory_of_the_caller or more_memory"
# The page and the socket that show the counters are Python's. The extension waits for files of the
# source with passthrough as without it.
slow+=" or metrics_page or nothing_listens or in_words_and_over"
slow+=" or (test_many_waiters and passthrough)"
[ $# -gt 0 ] || set -- -q -n 3 --modes relay,passthrough,no_open tests/fuse \
    tests/mount/test_counters.py tests/datasets/test_files.py tests/datasets/test_range_reads.py \
    -k "not ($slow$unfit)"
compile_only=''
[ "${1:-}" != --compile ] || compile_only=yes
[ -x "$PYTHON" ] || fail "there is no Python in $VENV; run scripts/test once"

compiler=${CC:-gcc}
preload=()
for library in "${libraries[@]}"; do
    # A library that the compiler does not have comes back as its bare name.
    file=$(readlink -f "$("$compiler" -print-file-name="$library")")
    [ -e "$file" ] || fail "$compiler has no $library"
    preload+=("$file")
done

work=$(mktemp -d) || exit 1
cd "$ROOT" || exit 1
suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
flags+=(-std=c11 -D_GNU_SOURCE -O1 -g -fno-omit-frame-pointer -Wall -Wextra -fPIC -pthread)
# What is compiled, by what, and how.
sum=$(
    {
        cat monarch/*/native/*.[ch]
        printf '%s\n' "$include" "${flags[@]}"
        "$compiler" --version
    } | sha256sum | cut -c1-16
)
built=.cache/sanitized/$kind-$sum
staged=.cache/sanitized/.$kind.$$
trap 'rm -rf "$work" "$ROOT/$staged"' EXIT

# build PACKAGE NAME: the extension NAME of a package from the sources in its native/.
build() {
    local objects=$work/objects/$2 sources=("$ROOT/$1/native"/*.c)
    mkdir -p "$objects"
    (cd "$objects" && printf '%s\0' "${sources[@]}" |
        xargs -0 -n 2 -P "$(nproc)" "$compiler" "${flags[@]}" -isystem "$include" -c) &&
        "$compiler" "${flags[@]}" -shared "$objects"/*.o -o "$staged/$2$suffix"
}
if [ ! -d "$built" ]; then
    mkdir -p "$staged" || exit 1
    build monarch/fuse _datapath && build monarch/datasets _many ||
        fail "an extension does not compile"
    rm -rf ".cache/sanitized/$kind"-*
    # Another run may have compiled the same.
    mv -T "$staged" "$built" 2>/dev/null || [ -d "$built" ] || fail "$built cannot be made"
fi
[ -z "$compile_only" ] || exit 0

mkdir "$work/checkout" "$work/reports"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ -e "$file" ] && printf '%s\0' "$file"
done | tar -c --null -T - | tar -x -C "$work/checkout"
cp "$built/_datapath$suffix" "$work/checkout/monarch/fuse"
cp "$built/_many$suffix" "$work/checkout/monarch/datasets"
cd "$work/checkout" || exit 1
base=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')

# Only Python loads the libraries: they would slow down, or confuse, other programs that tests start.
# A wrapper sets LD_PRELOAD for Python alone, and Python removes the variable when it starts.
mkdir -p "$work/venv/bin" "$work/startup"
cp "$VENV/pyvenv.cfg" "$work/venv/"
ln -s "$(readlink -f "$VENV/lib")" "$work/venv/lib"
cat >"$work/venv/bin/python" <<WRAPPER
#!/bin/bash
export LD_PRELOAD='$(IFS=:; printf '%s' "${preload[*]}")'
exec -a "$work/venv/bin/python" '$(readlink -f "$PYTHON")' "\$@"
WRAPPER
chmod +x "$work/venv/bin/python"
echo 'import os; os.environ.pop("LD_PRELOAD", None)' >"$work/startup/sitecustomize.py"

# The interpreter ends without freeing everything, so leaks are not detected. A library under test
# may handle SIGSEGV itself, and ask for more memory than there is.
common="log_path=$work/reports/report:exitcode=66:handle_segv=0:allocator_may_return_null=1"
export ASAN_OPTIONS="$common:detect_leaks=0:abort_on_error=0:halt_on_error=1:detect_odr_violation=0"
export UBSAN_OPTIONS="$common:print_stacktrace=1:halt_on_error=1"
export TSAN_OPTIONS="$common:halt_on_error=0:report_signal_unsafe=0:ignore_noninstrumented_modules=1"
# Tests fork processes of several threads, which begin threads of their own.
TSAN_OPTIONS+=":die_after_fork=0"
export PYTHONMALLOC=malloc PYTHONPATH=$work/startup:$work/checkout
# Bytecode is kept by the path of its source. What there is of the originals is valid for the copies.
cache=${PYTHONPYCACHEPREFIX:-$ROOT/.cache/pycache}
own=$work/pycache
mkdir -p "$own$work/venv" "$own$work/checkout"
if [ -d "$cache$ROOT/monarch" ]; then
    cp -r "$cache$ROOT/monarch" "$cache$ROOT/tests" "$own$work/checkout"
    ln -s "$cache$(readlink -f "$VENV")/lib" "$own$work/venv/lib"
    mkdir -p "$(dirname "$own$base")" && ln -s "$cache$base" "$own$base"
fi
export PYTHONPYCACHEPREFIX=$own
unset PYTHONDONTWRITEBYTECODE
# Directories of its own: of two runs at once, one may remove old directories that the other lists.
"$work/venv/bin/python" -m pytest -p no:cacheprovider --timeout 600 --basetemp="$work/tests" "$@"
status=$?

shopt -s nullglob
reports=("$work"/reports/*)
for report in "${reports[@]}"; do
    printf '%s\n' "==> $kind: ${report##*/}"
    head -n 150 "$report"
done
[ ${#reports[@]} -eq 0 ] || fail "${#reports[@]} processes had something to report"
exit $status
