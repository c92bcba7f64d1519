#!/usr/bin/env bash
# `dagrl launch` on machines that ssh reaches without a password, one name on each line of a file, rank 0 first:
#
#   launch/ssh.sh HOSTS pipeline.yaml [key=value ...] [--run-dir DIR]
#
# It runs in the folder of the same path on each machine. Further settings, from the environment: DAGRL (the command;
# default: dagrl), PET_MASTER_ADDR (rank 0's address for the others; default: its name in the file), PET_MASTER_PORT,
# PET_NPROC_PER_NODE. Ctrl-C saves and stops everywhere; a second one stops at once.
set -euo pipefail

if [[ $# -lt 2 || ! -r $1 ]]; then
    echo "usage: $0 HOSTS pipeline.yaml [key=value ...] [--run-dir DIR]; HOSTS is a file with a name on each line" >&2
    exit 2
fi
mapfile -t hosts < <(sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d' "$1")
shift
if [[ ${#hosts[@]} -eq 0 ]]; then
    echo "$0: the file names no host" >&2
    exit 2
fi
if [[ $(printf '%s\n' "${hosts[@]}" | sort | uniq -d) ]]; then
    echo "$0: the file names a host twice; each line is a machine of its own" >&2
    exit 2
fi

# Words as any shell on the other side reads them.
quoted() {
    local word
    for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
# On each machine: the token comes first on stdin, so that no list of processes shows it. A line that follows asks for
# the end, as Ctrl-C does; and so does the end of stdin, for then nobody is left who could.
# shellcheck disable=SC2016  # all of it is for the other side
remote='IFS= read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN; exec 3<&0
"$@" & launched=$!
(while IFS= read -r _ <&3; do kill "$launched"; done; kill "$launched") 2>/dev/null & watching=$!
wait "$launched"; code=$?
while kill -0 "$launched" 2>/dev/null; do wait "$launched"; code=$?; done
kill "$watching" 2>/dev/null
exit "$code"'

pipes=() calls=()
for rank in "${!hosts[@]}"; do
    variables=(
        "PET_NNODES=${#hosts[@]}" "PET_NODE_RANK=$rank" "PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-auto}"
        "PET_MASTER_ADDR=${PET_MASTER_ADDR:-${hosts[0]#*@}}" "PET_MASTER_PORT=${PET_MASTER_PORT:-29500}"
    )
    command=$(quoted bash -c "$remote" dagrl env "${variables[@]}" "${DAGRL:-dagrl}" launch "$@")
    exec {pipe}> >(
        # Whoever holds the other end of somebody else's pipe would keep it open.
        for other in "${pipes[@]}"; do exec {other}>&-; done
        # A session of its own: Ctrl-C is told to the other side below, and must not cut the connection.
        exec setsid ssh -o BatchMode=yes "${hosts[rank]}" "cd $(quoted "$PWD") && exec $command"
    )
    calls+=($!) pipes+=("$pipe")
    printf '%s\n' "$token" >&"$pipe"
done

# Rank 0 tells the others.
trap 'echo stop >&"${pipes[0]}" || true' INT TERM HUP
code=0
for rank in "${!calls[@]}"; do
    status=0
    while wait "${calls[rank]}" || status=$?; kill -0 "${calls[rank]}" 2>/dev/null; do status=0; done
    if [[ $rank -eq 0 ]]; then code=$status; fi
done
exit "$code"
