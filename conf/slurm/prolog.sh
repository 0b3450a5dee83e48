#!/bin/bash
# Slurm prolog: mounts the data sets of /etc/monarch/slurm.conf before a job starts on this node.
#
#   slurm.conf:  Prolog=/etc/monarch/prolog.sh   Epilog=/etc/monarch/epilog.sh   PrologFlags=Alloc
#
# /etc/monarch/slurm.conf is read by this shell:
#
#   MONARCH_MOUNTS="imagenet:/mnt/imagenet"   names in monarch.yaml with their mount points
#   MONARCH_CONFIG=/etc/monarch/monarch.yaml
#   MONARCH_PATH=/opt/monarch/bin             where `monarch` is; Slurm gives a prolog no useful PATH
#   MONARCH_EVICT=no                          yes: the epilog frees the tiers after the last job
#   MONARCH_DRAIN=10m                         how long the epilog waits until all written files are at the
#                                             source; after that the mount stays and drains them
#   MONARCH_STRICT=no                         yes: a mount that fails drains the node and requeues the job
#
# The prolog runs as root under slurmd, so the daemon is in no step's control group: one that a step
# starts is killed when the step ends. Jobs that share the node share the mount; the epilog of the
# last one ends it. In a prolog the list of nodes is SLURM_NODELIST (SLURM_JOB_NODELIST is for jobs).

set -u
CONFIG=${MONARCH_SLURM_CONF:-/etc/monarch/slurm.conf}
[ -r "$CONFIG" ] || exit 0
MONARCH_MOUNTS='' MONARCH_CONFIG=/etc/monarch/monarch.yaml MONARCH_PATH='' MONARCH_STRICT=no
MONARCH_RUN=/run/monarch-slurm MONARCH_LOG=/var/log/monarch-slurm.log
. "$CONFIG"
export PATH=$MONARCH_PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
umask 077

# A daemon that kept slurmd's stdout or stderr would hold up the job: all three are redirected.
exec </dev/null >>"$MONARCH_LOG" 2>&1

log() { echo "$(date '+%F %T') prolog job=${SLURM_JOB_ID:-?} nodes=${SLURM_NODELIST:-?} $*"; }

start() { # NAME: mounts it; returns when the mount answers
    if [ -d /run/systemd/system ] && systemctl cat "monarch@$1.service" >/dev/null 2>&1; then
        systemctl start "monarch@$1.service"
    elif [ -d /run/systemd/system ]; then
        # Out of slurmd.service, or the daemon ends with the next restart of slurmd.
        systemd-run --quiet --collect --unit "monarch-slurm-$1" --service-type=forking \
            --setenv=PATH="$PATH" monarch mount -c "$MONARCH_CONFIG" "$1"
    else
        setsid monarch mount -c "$MONARCH_CONFIG" "$1"
    fi 9>&- # the daemon must not inherit the lock
}

status=0
mkdir -p "$MONARCH_RUN"
exec 9>"$MONARCH_RUN/lock"
flock 9
for entry in $MONARCH_MOUNTS; do
    name=${entry%%:*} mountpoint=${entry#*:}
    mkdir -p "$MONARCH_RUN/$name"
    # `status` asks the daemon, not the mount: a dead mount would answer nothing.
    if monarch status "$mountpoint" >/dev/null 2>&1 9>&- || start "$name"; then
        touch "$MONARCH_RUN/$name/${SLURM_JOB_ID:-none}"
    else
        log "monarch mount $name failed with $?"
        status=1
    fi
done

# Any status but 0 drains the node. A job can do without Monarch: it finds the mount point empty
# and reads the source.
[ "$MONARCH_STRICT" = yes ] || status=0
exit $status
