"""DDP around a model that has grown: the wrapper stays the same object, and reduces the gradients of the new parameters."""

from __future__ import annotations

from inspect import signature

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from instar.growth.live.modules import take_over
from instar.growth.live.wrappers import wrappers


def renew(model: Module) -> None:
    """Makes DDP reduce the gradients of the parameters that its module has now, as if it was wrapped anew.

    A collective: rank 0's parameters and buffers are sent to all, and their shapes are compared.
    """
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            settings = {
                name: vars(wrapper)[name]
                for name in signature(type(wrapper)).parameters
                if name in vars(wrapper) and name != "device_mesh"  # whose group it also has
            }
            if not wrapper.bucket_bytes_cap_default:
                settings["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
            made = type(wrapper)(wrapper.module, **settings)
            for hook, state in wrapper._comm_hooks:
                made.register_comm_hook(state, hook)
            # the old reducer ends here, and with it its hooks on the parameters that both have
            take_over(wrapper, made)
