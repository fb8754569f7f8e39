"""What zero-shot methods need from a network. They can train any module that implements these protocols."""

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
    """An autoencoder of image features that shares its latent space with those of attributes, as `CadaVae`."""

    encoder: nn.Module  # features (B, D) to a Gaussian; has an `input_shape` too
    decoder: nn.Module
    latent: int
    input_shape: tuple[int, ...]  # (D,)

    def attribute_vae(self, attributes: int) -> nn.Module:
        """A new `AttributeVae` for the same latent space."""

    def sample(self, gaussian: Gaussian) -> Tensor:
        """Draws latents at random."""

    def loss(self, visual: Gaussian, x: Tensor, attribute_vae: Any, a: Tensor, progress: float) -> Tensor:
        """The loss of images `x`, encoded as `visual`, and the attributes `a` of their classes, summed over them.

        `progress` is the share of the epochs that is over.
        """


def is_aligned_vae(network: nn.Module) -> bool:
    """Whether a network implements `AlignedVae`.

    (`isinstance` does not see the attributes that modules store in dictionaries.)
    """
    wanted = ("encoder", "decoder", "latent", "input_shape", "attribute_vae", "sample", "loss")
    return all(hasattr(network, name) for name in wanted)
