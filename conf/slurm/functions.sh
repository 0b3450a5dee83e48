#!/bin/bash
# Read by prolog.sh and epilog.sh: their settings, and the end of the cache of a job.
# The settings are described in prolog.sh.

set -u
CONFIG=${MONARCH_SLURM_CONF:-/etc/monarch/slurm.conf}
[ -r "$CONFIG" ] || exit 0
MONARCH_MOUNTS='' MONARCH_CONFIG=/etc/monarch/monarch.yaml MONARCH_PATH='' MONARCH_STRICT=no
MONARCH_EVICT=no MONARCH_DRAIN=10m MONARCH_COMMENT=no MONARCH_REPORT=''
MONARCH_JOBS=/var/lib/monarch-jobs MONARCH_KEY=/etc/monarch/key
MONARCH_RUN=/run/monarch-slurm MONARCH_LOG=/var/log/monarch-slurm.log
. "$CONFIG"
export PATH=$MONARCH_PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
umask 077

# A daemon that kept slurmd's stdout or stderr would hold up the job: all three are redirected.
exec </dev/null >>"$MONARCH_LOG" 2>&1

JOB=${SLURM_JOB_ID:-none}
# For the configuration: the directory of the cache of this job on this node.
export MONARCH_JOB=$MONARCH_JOBS/$JOB

log() { echo "$(date '+%F %T') ${0##*/} job=$JOB nodes=${SLURM_NODELIST:-?} $*"; }

is_of_job() { # ENTRY: whether each job has a mount of its own
    case $1 in *%j*) return 0 ;; *) return 1 ;; esac
}

is_cache() { # DIRECTORY: whether a prolog has made it; all else in MONARCH_JOBS stays
    [ -O "$1/mounts" ]
}

is_mounted() { grep -qsF " $1 fuse.monarch " /proc/self/mounts; }

# Each cache has a lock of its own: the drain of one job holds up no other job.
lock_job() { # ID [-n]: waits, unless -n; the lock ends with the shell that has it
    local file=$MONARCH_RUN/job-$1.lock
    mkdir -p "$MONARCH_RUN"
    while :; do
        exec 8>"$file"
        flock "${@:2}" 8 || return
        # end_job may have removed the file meanwhile: another shell can lock the next one.
        [ "$file" -ef /proc/self/fd/8 ] && return
    done
}

end_job() { # ID TIME: unmounts the cache of a job, drains for TIME, and removes the cache
    local directory=$MONARCH_JOBS/$1 mountpoint code left
    if ! is_cache "$directory"; then
        rm -f "$MONARCH_RUN/job-$1.lock"
        return 0
    fi
    while read -r mountpoint; do
        is_mounted "$mountpoint" || continue
        monarch umount "$mountpoint" --timeout "$2" 8>&-
        code=$?
        # A process that outlives its job may have files open.
        if [ $code != 0 ] && [ $code != 13 ]; then
            monarch umount "$mountpoint" --lazy --timeout "$2" 8>&-
        fi
        if is_mounted "$mountpoint"; then
            log "job $1: $mountpoint stays mounted: monarch umount ended with $code"
            return 1
        fi
        rmdir "$mountpoint"
    done < <(cat "$directory/mounts" 2>/dev/null)
    # A daemon notes that before it answers the first call that writes. In held it has files of
    # another node of the job (writeback.replicate), each with a record. The paths begin in the
    # directory: one above it may have any name. A directory that cannot be read may have some.
    if ! left=$(cd "$directory" && find . '(' -name undrained.json -o -path '*/held/*/*.json' ')' -print -quit) ||
        [ -n "$left" ]; then
        log "job $1: $directory stays: it has, or may have, written files that are not at the source"
        return 1
    fi
    rm -rf --one-file-system "$directory"
    rm -f "$MONARCH_RUN/job-$1.lock"
}
