#!/usr/bin/env bash
# Runs `dagrl launch` on machines that ssh reaches without a password. HOSTS has one name per line, rank 0 first:
#
#   launch/ssh.sh HOSTS pipeline.yaml [key=value ...] [--run-dir DIR]
#
# It runs in the current folder's path on each machine. Environment variables: DAGRL (the command; default: dagrl),
# PET_MASTER_ADDR (address of rank 0; default: its name in the file), PET_MASTER_PORT, PET_NPROC_PER_NODE. Ctrl-C saves
# and stops on all machines; a second one stops at once.
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
    echo "$0: the file names a host twice; write each machine on one line" >&2
    exit 2
fi

# Quotes words for any shell on the other side.
quoted() {
    local word
    for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
# On each machine, the token is the first line of stdin, so that no process list shows it. Each further line, and the
# end of stdin, stops the run like Ctrl-C.
# shellcheck disable=SC2016  # the remote shell expands the variables
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
        # A copy of another host's pipe would keep that pipe open.
        for other in "${pipes[@]}"; do exec {other}>&-; done
        # A new session: Ctrl-C must not cut the connection; the trap below forwards it.
        exec setsid ssh -o BatchMode=yes "${hosts[rank]}" "cd $(quoted "$PWD") && exec $command"
    )
    calls+=($!) pipes+=("$pipe")
    printf '%s\n' "$token" >&"$pipe"
done

# Rank 0 forwards it to the others.
trap 'echo stop >&"${pipes[0]}" || true' INT TERM HUP
code=0
for rank in "${!calls[@]}"; do
    status=0
    while wait "${calls[rank]}" || status=$?; kill -0 "${calls[rank]}" 2>/dev/null; do status=0; done
    if [[ $rank -eq 0 ]]; then code=$status; fi
done
exit "$code"
