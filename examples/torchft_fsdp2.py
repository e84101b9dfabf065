"""Two clusters, each a torchrun job that shards the model by FSDP2, and torchft's DiLoCo between them.

    torchft_lighthouse --min_replicas 2 --join_timeout_ms 10000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    torchrun --standalone --nproc-per-node 2 examples/torchft_fsdp2.py --group 0
    torchrun --standalone --nproc-per-node 2 examples/torchft_fsdp2.py --group 1          # at the same time

Inside a group FSDP2 synchronizes every step over the fast network. Between groups rank i of one meets rank i of the
others once in H steps, with its shard of the pseudo-gradient. Both end with the same weights and print the same hash.
The groups need the same number of ranks. Kill one (all its ranks, by any signal) and restart it: it heals from the
other at its first sync. Meanwhile the other waits for it, because the lighthouse was told --min_replicas 2; with 1 it
continues alone once the lighthouse has heard nothing for --heartbeat_timeout_ms, and the first group to start also
trains alone.

Nothing here is encrypted, and a healing replica unpickles what its peer sends: use it only on networks you trust.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from outerstep.integrations.torchft import make_diloco


def main() -> None:
    options = parse_options()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)  # all groups start with the same weights
    model = sharded(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding: it must hold what the model holds
    manager = make_manager(options, device)
    diloco = make_diloco(
        manager,
        model,
        optimizer,
        sync_every=options.sync_every,
        num_fragments=options.num_fragments,
        fragment_delay=options.fragment_delay,
    )
    data = torch.Generator().manual_seed(1000 * options.group + dist.get_rank())  # every rank of every group its own
    with diloco:
        while manager.current_step() < options.outer_steps:  # counted by commits, so that all groups stop together
            inputs = torch.randn(32, 16, generator=data).to(device)
            loss = (model(inputs) - inputs.sum(1, keepdim=True).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if diloco.just_synced and dist.get_rank() == 0:
                print(f"group {options.group}: outer step {manager.current_step()}, loss {loss.item():.4f}", flush=True)
    diloco.take_global_weights()  # all fragments as last agreed: now all groups hold the same weights
    digest = weights_hash(model)
    if dist.get_rank() == 0:
        print(f"group {options.group}: weights {digest}", flush=True)
    manager.shutdown(wait=False)
    dist.destroy_process_group()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def sharded(model: nn.Module) -> nn.Module:
    """Parameters in fp32, for the outer step; computation in bf16 where that is fast."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else None
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_manager(options: argparse.Namespace, device: torch.device) -> Manager:
    """One per rank; rank 0's talks to the lighthouse.

    The store is created here, because torchrun's outlives a restart of the group, and would still hold the dead
    manager. `timeout` is for an exchange and for healing; `quorum_timeout` must be longer than the slowest group needs
    for its H steps, or the others give up on it.
    """
    rank, patience = dist.get_rank(), timedelta(seconds=options.timeout_s)
    store = dist.TCPStore(options.host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    place = [(options.host, store.port) if store else None]
    dist.broadcast_object_list(place, src=0)
    host, port = place[0] or ("", 0)
    manager = Manager(
        pg=ProcessGroupNCCL(patience) if device.type == "cuda" else ProcessGroupGloo(patience),
        load_state_dict=None,  # make_diloco adds model, optimizers and anchors; put here what else must heal
        state_dict=None,
        min_replica_size=options.min_replicas,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=timedelta(seconds=options.quorum_timeout_s),
        rank=rank,
        world_size=dist.get_world_size(),
        store_addr=host,
        store_port=port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"group_{options.group}",
        hostname=options.host,
        init_sync=False,  # they are equal already; with several ranks it would mix several groups' weights
        quorum_retries=3,  # a lighthouse that is restarted
    )
    manager.store_of_this_group = store  # it serves as long as it is referenced
    return manager


def weights_hash(model: nn.Module) -> str:
    """The hash of the full weights; every rank takes part."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(whole(param.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lighthouse", default=os.environ.get("TORCHFT_LIGHTHOUSE"), help="http://host:port")
    parser.add_argument("--group", type=int, required=True, help="0, 1, …: a different one for every torchrun job")
    parser.add_argument("--host", default=socket.gethostname(), help="this machine's name as the other groups know it")
    parser.add_argument("--min-replicas", type=int, default=1, help="the fewest groups that may take an outer step")
    parser.add_argument("--outer-steps", type=int, default=12)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--num-fragments", type=int, default=2)
    parser.add_argument("--fragment-delay", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--quorum-timeout-s", type=float, default=1800.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
