#!/usr/bin/env bash
# Starts one training on several machines: one torchrun on each, over ssh or as a SLURM job.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/launch_cluster.sh --hosts A,B,C,D [OPTIONS] -- OVERRIDES
       scripts/launch_cluster.sh --slurm NODES   [OPTIONS] -- OVERRIDES

OVERRIDES are the overrides of bev_lightning.train, such as hardware=4n1x4090 model=bevfusion.

  --hosts A,B,..      machines reachable by ssh without a password; the first is the rendezvous host
  --slurm NODES       print a SLURM batch script for so many nodes:
                      scripts/launch_cluster.sh --slurm 4 -- hardware=4n1x4090 | sbatch
  --processes N       processes on each machine, one per GPU (1)
  --restarts N        how often torchrun restarts all processes after a failure (0)
  --port P            port of the rendezvous host (29500)
  --wait S            how long the machines wait for each other at the start [s] (600)
  --interface NAME    network interface for NCCL and gloo (chosen by them)
  --dir FOLDER        folder of the checkout, the same on all machines (this one)
  --python FILE       Python interpreter on all machines (.venv/bin/python in the folder)
  --verb NAME         train or evaluate (train)
  --print             print the commands without running them

All machines must share the folder of the checkpoints (paths.output) and see the data under the same
path. The overrides must set hardware.nodes and hardware.devices, as hardware=4n1x4090 does. If a
process fails, all others are stopped; the same command with resume=auto continues from the newest
checkpoint.
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
        *) fail "$1 is unknown; see --help, and put -- before the overrides" ;;
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
[[ -z "$hosts" || "$nodes" == 0 ]] || fail "give only one of --hosts and --slurm"
for number in "$nodes" "$processes" "$restarts" "$port" "$wait_s"; do
    [[ "$number" =~ ^[0-9]+$ ]] || fail "$number is not a whole number"
done
overrides=("$@")

# Prints the torchrun command for machine $1, which the others reach by that name.
torchrun_command() {
    local network=()
    [[ -z "$interface" ]] || network=("NCCL_SOCKET_IFNAME=$interface" "GLOO_SOCKET_IFNAME=$interface")
    printf '%q ' env "${network[@]}" "$python" -m torch.distributed.run \
        "--nnodes=${#machines[@]}" "--nproc-per-node=$processes" "--max-restarts=$restarts" \
        --rdzv-backend=c10d "--rdzv-endpoint=${machines[0]}:$port" "--rdzv-id=$job_id" \
        "--rdzv-conf=join_timeout=$wait_s,is_host=$([[ $1 == "${machines[0]}" ]] && echo 1 || echo 0)" \
        "--local-addr=$1" -m "bev_lightning.$verb" "${overrides[@]}"
}

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
# One task per GPU: srun starts the processes, and Lightning reads SLURM's variables. Three minutes
# before the time limit SLURM sends SIGUSR1: the job saves a checkpoint, is requeued and resumes.
cd $(printf %q "$dir")
${interface:+export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
}srun --kill-on-bad-exit=1 $(printf '%q ' "$python" -m "bev_lightning.$verb" "${overrides[@]}")
TEXT
    exit 0
fi

IFS=, read -ra machines <<<"$hosts"
job_id="bev_$(date +%s)_$$"
pids=()
for machine in "${machines[@]}"; do
    command="cd $(printf %q "$dir") && exec $(torchrun_command "$machine")"
    if ((only_print)); then
        echo "$machine: $command"
        continue
    fi
    # -tt: the remote processes end with the connection.
    ssh -tt -o BatchMode=yes "$machine" "$command" </dev/null > >(sed -u "s/^/$machine: /") 2>&1 &
    pids+=("$!")
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
((code == 0)) || echo "launch_cluster.sh: a machine ended with exit code $code; see its output above" >&2
exit "$code"
