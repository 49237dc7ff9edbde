#!/usr/bin/env bash
# Starts one training on several machines: one torchrun on each, over ssh or as a SLURM job.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/launch_cluster.sh --hosts A,B,C,D [OPTIONS] -- WORDS OF bev_lightning.train
       scripts/launch_cluster.sh --slurm NODES   [OPTIONS] -- WORDS OF bev_lightning.train

  --hosts A,B,..      machines that ssh reaches without a password; the first one is the meeting point
  --slurm NODES       write a SLURM script for so many machines to the standard output:
                      scripts/launch_cluster.sh --slurm 4 -- hardware=4n1x4090 | sbatch
  --processes N       processes, one for each card, on every machine (1)
  --restarts N        how often torchrun starts all processes anew after a failure (0)
  --port P            of the meeting point (29500)
  --wait S            how long the machines wait for each other at the start [s] (600)
  --interface NAME    network between the machines, for NCCL and gloo; theirs to choose without it
  --dir FOLDER        of the checkout, the same on all machines (this one)
  --python FILE       the interpreter on all machines (.venv/bin/python of the folder)
  --verb NAME         train or evaluate (train)
  --print             say what would be run, run nothing

The machines have to share the folder of the checkpoints (paths.output) and to see the data at the
same place. The words say hardware.nodes and hardware.devices, as hardware=4n1x4090 does. A failed
process ends all others; the same line with resume=auto goes on from the newest checkpoint.
TEXT
}

fail() { echo "launch_cluster.sh: $*" >&2; exit 2; }

hosts="" nodes=0 processes=1 restarts=0 port=29500 wait_s=600 interface="" verb=train only_print=0
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
dir="$here" python=""
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --print) only_print=1; shift; continue ;;
        --) shift; break ;;
        --hosts | --slurm | --processes | --restarts | --port | --wait | --interface | --dir | --python | --verb)
            (($# > 1)) || fail "$1 needs a value; see --help" ;;
        *) fail "$1 is unknown; see --help, and put -- before the words of the training" ;;
    esac
    case "$1" in
        --hosts) hosts="$2" ;;
        --slurm) nodes="$2" ;;
        --processes) processes="$2" ;;
        --restarts) restarts="$2" ;;
        --port) port="$2" ;;
        --wait) wait_s="$2" ;;
        --interface) interface="$2" ;;
        --dir) dir="$2" ;;
        --python) python="$2" ;;
        --verb) verb="$2" ;;
    esac
    shift 2
done
python="${python:-$dir/.venv/bin/python}"
[[ -n "$hosts" || "$nodes" != 0 ]] || fail "give --hosts A,B,.. or --slurm NODES; see --help"
[[ -z "$hosts" || "$nodes" == 0 ]] || fail "give one of --hosts and --slurm"
for number in "$nodes" "$processes" "$restarts" "$port" "$wait_s"; do
    [[ "$number" =~ ^[0-9]+$ ]] || fail "$number is not a whole number"
done

# The words of torchrun on machine $1, which the others reach by that name.
compose() {
    local network=()
    [[ -z "$interface" ]] || network=("NCCL_SOCKET_IFNAME=$interface" "GLOO_SOCKET_IFNAME=$interface")
    printf '%q ' env "${network[@]}" "$python" -m torch.distributed.run \
        "--nnodes=${#machines[@]}" "--nproc-per-node=$processes" "--max-restarts=$restarts" \
        --rdzv-backend=c10d "--rdzv-endpoint=${machines[0]}:$port" "--rdzv-id=$name" \
        "--rdzv-conf=join_timeout=$wait_s,is_host=$([[ $1 == "${machines[0]}" ]] && echo 1 || echo 0)" \
        "--local-addr=$1" -m "bev_lightning.$verb" "${words[@]}"
}
words=("$@")

if [[ "$nodes" != 0 ]]; then
    cat <<TEXT
#!/usr/bin/env bash
#SBATCH --job-name=bev_$verb
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$processes
#SBATCH --gpus-per-node=$processes
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
# One task for each card: srun starts the processes, Lightning reads SLURM's variables. The job saves
# at SIGUSR1, three minutes before its time is over, queues again and goes on.
cd $(printf %q "$dir")
${interface:+export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
}srun --kill-on-bad-exit=1 $(printf '%q ' "$python" -m "bev_lightning.$verb" "${words[@]}")
TEXT
    exit 0
fi

IFS=, read -ra machines <<<"$hosts"
name="bev_$(date +%s)_$$"
pids=()
for machine in "${machines[@]}"; do
    command="cd $(printf %q "$dir") && exec $(compose "$machine")"
    if ((only_print)); then
        echo "$machine: $command"
        continue
    fi
    # -tt: what runs there ends with the connection.
    ssh -tt -o BatchMode=yes "$machine" "$command" </dev/null > >(sed -u "s/^/$machine: /") 2>&1 &
    pids+=("$!")
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
((code == 0)) || echo "launch_cluster.sh: a machine ended with exit code $code; its lines stand above" >&2
exit "$code"
