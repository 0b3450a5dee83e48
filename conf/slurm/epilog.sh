#!/bin/bash
# Slurm epilog: unmounts what prolog.sh mounted, when no other job of this node uses it any more.
# Settings: see prolog.sh. The tiers keep their copies for the next job unless MONARCH_EVICT=yes.

set -u
CONFIG=${MONARCH_SLURM_CONF:-/etc/monarch/slurm.conf}
[ -r "$CONFIG" ] || exit 0
MONARCH_MOUNTS='' MONARCH_PATH='' MONARCH_EVICT=no MONARCH_STRICT=no MONARCH_DRAIN=10m
MONARCH_RUN=/run/monarch-slurm MONARCH_LOG=/var/log/monarch-slurm.log
. "$CONFIG"
export PATH=$MONARCH_PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
umask 077
exec </dev/null >>"$MONARCH_LOG" 2>&1

log() { echo "$(date '+%F %T') epilog job=${SLURM_JOB_ID:-?} nodes=${SLURM_NODELIST:-?} $*"; }

status=0
mkdir -p "$MONARCH_RUN"
exec 9>"$MONARCH_RUN/lock"
flock 9
for entry in $MONARCH_MOUNTS; do
    name=${entry%%:*} mountpoint=${entry#*:}
    [ -e "$MONARCH_RUN/$name/${SLURM_JOB_ID:-none}" ] || continue
    rm -f "$MONARCH_RUN/$name/${SLURM_JOB_ID:-none}"
    # rmdir fails while another job's mark is there.
    rmdir "$MONARCH_RUN/$name" 2>/dev/null || continue
    if [ "$MONARCH_EVICT" = yes ]; then
        monarch evict "$mountpoint" 9>&- || log "monarch evict $mountpoint failed with $?"
    fi
    monarch umount "$mountpoint" --timeout "$MONARCH_DRAIN" 9>&-
    code=$?
    if [ $code = 13 ]; then
        # The mount stays for the next job on this node, and the daemon continues the drain.
        log "$mountpoint stays mounted: not all written files are at the source yet"
        status=1
    # A process that outlives its job may have files open: --lazy takes the mount away all the same.
    elif [ $code != 0 ] && ! monarch umount "$mountpoint" --lazy --timeout "$MONARCH_DRAIN" 9>&-; then
        log "monarch umount $mountpoint failed with $?"
        status=1
    fi
done

[ "$MONARCH_STRICT" = yes ] || status=0
exit $status
