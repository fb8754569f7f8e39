"""What methods for zero-shot tasks ask of a network; any module that has this can be trained by them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

Gaussian = tuple[Tensor, Tensor]
"""Mean and log-variance, (B, latent) each."""


class AttributeVae(Protocol):
    """An autoencoder of attributes."""

    encoder: nn.Module  # attributes (B, A) to a Gaussian
    decoder: nn.Module


class AlignedVae(Protocol):
    """An autoencoder of image features whose latent space others, of attributes, share: `rkr.networks.CadaVae`."""

    encoder: nn.Module  # features (B, D) to a Gaussian; has an `input_shape` too
    decoder: nn.Module
    latent: int
    input_shape: tuple[int, ...]  # (D,)

    def attribute_vae(self, attributes: int) -> nn.Module:
        """A new `AttributeVae` of so many attributes, for the same latent space."""

    def sample(self, gaussian: Gaussian) -> Tensor:
        """Latents drawn at random."""

    def loss(self, visual: Gaussian, x: Tensor, attribute_vae: Any, a: Tensor, progress: float) -> Tensor:
        """The loss of images `x`, encoded as `visual`, and the attributes `a` of their classes, summed over them.

        `progress` is the share of the epochs that is over.
        """


def is_aligned_vae(network: nn.Module) -> bool:
    """Whether a network has all that an `AlignedVae` has. (`isinstance` does not look where modules keep theirs.)"""
    wanted = ("encoder", "decoder", "latent", "input_shape", "attribute_vae", "sample", "loss")
    return all(hasattr(network, name) for name in wanted)
