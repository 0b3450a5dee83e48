#!/bin/bash
# Slurm epilog: unmounts what prolog.sh mounted, when no other job of this node uses it any more.
# Settings: see prolog.sh. The tiers keep their copies for the next job unless MONARCH_EVICT=yes. The
# cache of one job (%j) is removed with its copies.

. "$(dirname "$(readlink -f "$0")")/functions.sh"

comment() { # ENTRY...: what was saved on the first node of the job becomes its AdminComment
    local entry words text=''
    [ "$(scontrol show hostnames "$SLURM_NODELIST" | head -1)" = "$SLURMD_NODENAME" ] || return 0
    for entry; do
        is_mounted "${entry#*:}" || continue
        words=$(COLUMNS=1000 monarch status "${entry#*:}" 8>&- |
            sed -nE 's/^ *(saved|from other nodes) +([^;]*).*/\1: \2/p' | paste -sd, -)
        text+="${text:+; }${entry%%:*} on $SLURMD_NODENAME: $words"
    done
    # Not `scontrol update`, which refuses a job that has ended.
    [ -z "$text" ] ||
        timeout 20 sacctmgr -i modify job where "jobid=$JOB" set "admincomment=$text" ||
        log "sacctmgr failed: the job has no AdminComment"
}

report() { # ENTRY...: pages about the mounts of the job, written with the rights of its user
    local entry path user page="$MONARCH_RUN/report-$JOB"
    user=$(id -un "$SLURM_JOB_UID") || { log "user $SLURM_JOB_UID has no name: no page"; return 0; }
    for entry; do
        is_mounted "${entry#*:}" || continue
        path=${MONARCH_REPORT//%u/$user} path=${path//%j/$JOB}
        path=${path//%n/$SLURMD_NODENAME} path=${path//%m/${entry%%:*}}
        # A directory of the user may hang, and anything may be in the place of the page.
        timeout -k 5 60 monarch report "${entry#*:}" -o "$page" 8>&- &&
            timeout -k 5 60 setpriv --reuid="$SLURM_JOB_UID" --regid="$(id -g "$SLURM_JOB_UID")" \
                --init-groups sh -c 'cat >"$1.part" && mv -f "$1.part" "$1" || { rm -f "$1.part"; exit 1; }' \
                sh "$path" <"$page" 8>&- ||
            log "no page of ${entry#*:} at $path"
        rm -f "$page"
    done
}

status=0 of_job=()
mkdir -p "$MONARCH_RUN"
exec 9>"$MONARCH_RUN/lock"
flock 9
for entry in $MONARCH_MOUNTS; do
    name=${entry%%:*} mountpoint=${entry#*:}
    mountpoint=${mountpoint//%j/$JOB}
    if is_of_job "$entry"; then
        of_job+=("$name:$mountpoint")
        continue
    fi
    [ -e "$MONARCH_RUN/$name/$JOB" ] || continue
    rm -f "$MONARCH_RUN/$name/$JOB"
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
exec 9>&-
if [ ${#of_job[@]} != 0 ]; then
    lock_job "$JOB"
    [ "$MONARCH_COMMENT" != yes ] || comment "${of_job[@]}"
    [ -z "$MONARCH_REPORT" ] || report "${of_job[@]}"
    end_job "$JOB" "$MONARCH_DRAIN" || status=1
fi

[ "$MONARCH_STRICT" = yes ] || status=0
exit $status
