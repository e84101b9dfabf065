"""The end of a worker in a run without a server: where to find the agreed model, which no server holds.

A peer with a folder writes the model to its subfolder `model`: the weights last agreed on (without the peer's steps
since then), and the configuration of a Hugging Face model, so that `from_pretrained` loads it. A peer without a folder
logs that only its memory holds the model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from ..config import WorkerConfig
from ..config.effects import WITHOUT_SERVER
from ..errors import ModelError
from ..events import RunEnded
from ..model_folder import save_state_dict
from .replica import Replica, unwrapped

log = logging.getLogger(__name__)

MODEL = "model"


def report_end(
    config: WorkerConfig,
    model: nn.Module,
    replica: Replica,
    versions: Sequence[int],
    loss: float | None,
    reason: str,
    *,
    is_alone: bool,
) -> RunEnded | None:
    """Say where the model is. None: a server says so itself. `is_alone`: this process is not part of a group."""
    if config.topology not in WITHOUT_SERVER:
        return None
    ended = RunEnded(
        min(versions, default=0), loss, reason, _save(config, unwrapped(model), replica) if is_alone else ""
    )
    if ended.model:
        how = "from_pretrained" if (Path(ended.model) / "config.json").is_file() else "outerstep.load_model"
        log.info("%s; the agreed model is in %s: %s loads it", ended.said, ended.model, how)
    else:
        log.info("%s; the agreed model is in this process alone: outerstep.save_model(model, …) keeps it", ended.said)
    return ended


def _save(config: WorkerConfig, model: nn.Module, replica: Replica) -> str:
    """Write the model. Returns where; "" = nowhere."""
    folder = config.gossip.peer_dir
    if config.topology != "gossip" or folder is None or not replica.anchors:
        return ""
    place = Path(folder) / MODEL
    try:
        save_state_dict(agreed_state(model, replica), place)
        for part in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if callable(save := getattr(part, "save_pretrained", None)):
                save(place)
    except (OSError, ModelError, ValueError, TypeError) as error:
        log.error("the agreed model could not be written to %s: %s", place, error)
        return ""
    return str(place)


def agreed_state(model: nn.Module, replica: Replica) -> dict[str, Tensor]:
    """The model's state with the agreed weights in place of this worker's own; each tied tensor once."""
    aliases = replica.manifest.aliases
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    return {
        name: replica.anchors[name].to(tensor.dtype) if name in replica.anchors else tensor
        for name, tensor in state.items()
    }
