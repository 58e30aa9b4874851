#!/usr/bin/env bash
# Trains on one machine or many with torchrun, and goes on from the last checkpoint when a process or a machine is lost.
#
#   configs/cluster/torchrun.sh --config run.yaml                                     one machine, all its GPUs
#   NPROC=2 configs/cluster/torchrun.sh --config run.yaml --trainer.accelerator cpu   two processes on CPUs
#   NODES=4 HEAD=node1:29400 configs/cluster/torchrun.sh --config run.yaml            the same line on each of 4 machines
#   NODES=2:4 HEAD=node1:29400 configs/cluster/torchrun.sh --config run.yaml          elastic: 2 to 4 machines
#
# All machines need the same files: the run's folder and the store lie on a shared file system.
#
#   NODES     machines, or least:most                                        (1)
#   NPROC     processes on each machine: a number, gpu or cpu                (gpu)
#   HEAD      host:port of the machine that keeps the rendezvous             (this one, a free port)
#   JOB       name of the job, the same on all machines                      (lit-llm)
#   RESTARTS  how often lost processes are started again                     (3)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network interface, where a machine has several or its own name
#             resolves to 127.0.0.1; passed on as they are
#   TORCH_NCCL_ASYNC_ERROR_HANDLING, NCCL_DEBUG   of NCCL; passed on as they are
set -euo pipefail

# torchrun's own store outlives a restart, and with it the addresses of processes that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes="${NODES:-1}" --nproc_per_node="${NPROC:-gpu}" --max_restarts="${RESTARTS:-3}" \
  --rdzv_backend=c10d --rdzv_endpoint="${HEAD:-localhost:0}" --rdzv_id="${JOB:-lit-llm}" \
  --rdzv_conf="keep_alive_interval=5,keep_alive_max_attempt=3" \
  -m lit_llm fit --ckpt_path last "$@"
