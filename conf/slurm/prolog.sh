#!/bin/bash
# Slurm prolog: mounts the data sets of /etc/monarch/slurm.conf before a job starts on this node.
#
#   slurm.conf:  Prolog=/etc/monarch/prolog.sh   Epilog=/etc/monarch/epilog.sh   PrologFlags=Alloc
#
# functions.sh lies beside it. /etc/monarch/slurm.conf is read by this shell:
#
#   MONARCH_MOUNTS="imagenet:/mnt/imagenet"   names in monarch.yaml with their mount points; with %j, the
#                                             number of the job, each job has a mount of its own, in a
#                                             directory where only root may write
#   MONARCH_CONFIG=/etc/monarch/monarch.yaml
#   MONARCH_PATH=/opt/monarch/bin             where `monarch` is; Slurm gives a prolog no useful PATH
#   MONARCH_EVICT=no                          yes: the epilog frees the tiers after the last job
#   MONARCH_DRAIN=10m                         how long the epilog waits until all written files are at the
#                                             source; after that the mount stays and drains them
#   MONARCH_STRICT=no                         yes: a mount that fails drains the node and requeues the job
#   MONARCH_JOBS=/var/lib/monarch-jobs        has a directory for the cache of each job, on a local disk,
#                                             where only root may write. In monarch.yaml it is
#                                             $MONARCH_JOB
#   MONARCH_KEY=/etc/monarch/key              32 random bytes, the same on all nodes, of root, mode 0600:
#                                             the secrets of the jobs are made of them
#   MONARCH_COMMENT=no                        yes: the AdminComment of the job shows what was saved on its
#                                             first node (`sacct -o AdminComment`; needs slurmdbd)
#   MONARCH_REPORT=''                         the page of `monarch report` about each mount with %j, which
#                                             the epilog writes as the user of the job, like
#                                             /scratch/%u/monarch-%j-%n-%m.html: %u is the user, %j the
#                                             job, %n the node, %m the mount. '' writes none
#
# The prolog runs as root under slurmd, so the daemon is in no step's control group: one that a step
# starts is killed when the step ends. Jobs that share the node share the mount; the epilog of the
# last one ends it. In a prolog the list of nodes is SLURM_NODELIST (SLURM_JOB_NODELIST is for jobs).
#
# A mount with %j is of one job. Its nodes may share their copies (docs/nodes.md): the secret of the
# job is in $MONARCH_JOB/secret. The epilog removes the mount, its copies and the secret. What a node
# that failed has kept is removed by the prolog of the next job there.

. "$(dirname "$(readlink -f "$0")")/functions.sh"

start() { # NAME UNIT: mounts it; returns when the mount answers
    local run=(env) name
    if [ -d /run/systemd/system ] && [ "$1" = "$2" ] &&
        systemctl cat "monarch@$1.service" >/dev/null 2>&1; then
        systemctl start "monarch@$1.service" 9>&-
        return
    elif [ -d /run/systemd/system ]; then
        # Out of slurmd.service, or the daemon ends with the next restart of slurmd.
        run=(systemd-run --quiet --collect --unit "monarch-slurm-$2" --service-type=forking)
        for name in PATH MONARCH_JOB SLURM_JOB_ID SLURM_NODELIST SLURMD_NODENAME; do
            run+=("--setenv=$name=${!name:-}")
        done
    fi
    # The daemon must not inherit a lock. The shell keeps that of the job until the mount has begun or
    # failed: if Slurm kills the prolog (PrologEpilogTimeout), the epilog waits for it.
    setsid --wait sh -c '"$@" 8>&-; exit' sh "${run[@]}" monarch mount -c "$MONARCH_CONFIG" "$1" 9>&-
}

jobs_here() { # prints the jobs that may be on this node, between spaces; without an answer it fails
    local jobs
    jobs=$(timeout 20 squeue -h -w "${SLURMD_NODENAME:-$(hostname -s)}" -o %A \
        -t configuring,running,suspended,completing,stopped,signaling,stage_out) || return
    echo " ${jobs//$'\n'/ } "
}

end_earlier_jobs() { # ends the caches of jobs that left this node without an epilog, as after a failure
    local directory id running=''
    for directory in "$MONARCH_JOBS"/*; do
        id=${directory##*/}
        [[ $id =~ ^[0-9]+$ ]] && is_cache "$directory" && [ "$id" != "$JOB" ] || continue
        if [ -z "$running" ]; then
            # Without an answer no job is known to have ended.
            running=$(jobs_here) || return
        fi
        case $running in *" $id "*) continue ;; esac
        # It may have been requeued since, and its prolog may have made the next cache. With the lock
        # no prolog does.
        (lock_job "$id" -n && running=$(jobs_here) && [[ $running != *" $id "* ]] &&
            log "job $id has ended: its cache is removed" && end_job "$id" 10s)
    done
}

make_secret() { # writes the secret of this job: a keyed hash of its number, the same on all nodes
    [ -e "$MONARCH_KEY" ] || return 0
    if [ -n "$(find "$MONARCH_KEY" -perm /077)" ]; then
        log "$MONARCH_KEY is not used: other users can read it; chmod 600 $MONARCH_KEY"
        return 0
    fi
    # A secret that is made of an empty key could be guessed.
    if [ "$(stat -c %s "$MONARCH_KEY")" -lt 32 ]; then
        log "$MONARCH_KEY is not used: it has less than 32 bytes"
        return 0
    fi
    # The key goes through pipes only, and `printf` is part of the shell.
    { cat "$MONARCH_KEY"; { cat "$MONARCH_KEY"; printf 'job %s' "$JOB"; } | sha256sum; } |
        sha256sum | cut -c1-64 >"$MONARCH_JOB/secret"
}

begin_job() { # ENTRY...: the mounts of this job alone
    local entry name mountpoint
    end_earlier_jobs
    # A job that was requeued has the same number.
    (lock_job "$JOB" && end_job "$JOB" 10s) || return 1
    lock_job "$JOB"
    mkdir -p "$MONARCH_JOBS"
    # A directory that is there already was made by another program.
    mkdir "$MONARCH_JOB" && : >"$MONARCH_JOB/mounts" || return 1
    make_secret
    for entry; do
        name=${entry%%:*} mountpoint=${entry#*:}
        mountpoint=${mountpoint//%j/$JOB}
        # The parents are open to the users, and so is the mount point before the mount.
        (umask 022 && mkdir -p "$mountpoint")
        echo "$mountpoint" >>"$MONARCH_JOB/mounts"
        if ! start "$name" "$name-$JOB" || ! is_mounted "$mountpoint"; then
            log "monarch mount $name failed: $mountpoint is not mounted"
            return 1
        fi
    done
}

status=0 of_job=()
mkdir -p "$MONARCH_RUN"
exec 9>"$MONARCH_RUN/lock"
flock 9
for entry in $MONARCH_MOUNTS; do
    if is_of_job "$entry"; then
        of_job+=("$entry")
        continue
    fi
    name=${entry%%:*} mountpoint=${entry#*:}
    mkdir -p "$MONARCH_RUN/$name"
    # `status` asks the daemon, not the mount: a dead mount would answer nothing.
    if monarch status "$mountpoint" >/dev/null 2>&1 9>&- || start "$name" "$name"; then
        touch "$MONARCH_RUN/$name/$JOB"
    else
        log "monarch mount $name failed with $?"
        status=1
    fi
done
exec 9>&-
if [ ${#of_job[@]} != 0 ]; then
    begin_job "${of_job[@]}" || status=1
fi

# Any status but 0 drains the node. A job can do without Monarch: it finds the mount point empty
# and reads the source.
[ "$MONARCH_STRICT" = yes ] || status=0
exit $status
