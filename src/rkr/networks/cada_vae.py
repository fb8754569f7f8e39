"""CADA-VAE (Schoenfeld et al., CVPR 2019), which the paper's zero-shot experiments rectify.

Two variational autoencoders share a latent space: one of image features, one of class attributes. Once they are
aligned, latents of classes that have no images can be drawn from their attributes.

Where the authors' published code and the text of the papers differ, the code is the default and the text an option:
`noise`, `deviation`, `attribute_decoder`, `kl`, `alignment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.networks._arguments import require_positive
from rkr.networks.interfaces import Gaussian
from rkr.registry import register


class Encoder(nn.Module):
    """Maps vectors to the mean and log-variance of a Gaussian in the latent space.

    Mean and log-variance come from two separate layers: a single layer of twice the width has as many parameters, but
    would not give the paper's figures for rectification.
    """

    def __init__(self, in_features: int, hidden: int, latent: int) -> None:
        super().__init__()
        require_positive(in_features=in_features, hidden=hidden, latent=latent)
        self.input_shape = (in_features,)
        self.hidden = nn.Linear(in_features, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        _initialise(self)

    def forward(self, x: Tensor) -> Gaussian:
        """Compute the mean and the log-variance of a batch."""
        h = F.relu(self.hidden(x))  # (B, hidden)
        return self.mu(h), self.logvar(h)  # (B, latent) each


class VisualEncoder(Encoder):
    """The encoder of image features.

    "Task Incremental Learning Experiments (Generalized Zero-Shot Setting)" (RKR, CVPR 2021) rectifies this part of
    CADA-VAE and counts only its memory.
    """

    def __init__(self, in_features: int = 2048, hidden: int = 1560, latent: int = 64) -> None:
        super().__init__(in_features, hidden, latent)


class Decoder(nn.Module):
    """Maps latents back to vectors."""

    def __init__(self, latent: int, hidden: int, out_features: int) -> None:
        super().__init__()
        require_positive(latent=latent, hidden=hidden, out_features=out_features)
        self.hidden = nn.Linear(latent, hidden)
        self.out = nn.Linear(hidden, out_features)
        _initialise(self)

    def forward(self, z: Tensor) -> Tensor:
        """Compute vectors of a batch."""
        return self.out(F.relu(self.hidden(z)))


class Vae(nn.Module):
    """An encoder and its decoder."""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


@dataclass(frozen=True)
class WarmUp:
    """A weight that grows from 0 to `factor` between two epochs of a schedule of 100."""

    factor: float
    start: float
    end: float

    def __call__(self, progress: float) -> float:
        """The weight after a fraction `progress` (0 to 1) of the epochs."""
        return self.factor * min(1.0, max(0.0, (100 * progress - self.start) / (self.end - self.start)))


@dataclass(frozen=True)
class Terms:
    """The terms of the loss, unweighted, each summed over the batch and over dimensions."""

    reconstruction: Tensor
    kl: Tensor
    cross: Tensor
    alignment: Tensor


@register.network(
    "cada-vae",
    "CADA-VAE for image features and class attributes, for zero-shot recipes",
    citation="Schoenfeld et al., CVPR 2019",
)
class CadaVae(nn.Module):
    """The autoencoder of image features, and how it is trained together with one of attributes.

    Args:
        in_features: Of an image.
        latent: Dimensions of the latent space.
        encoder, decoder: Hidden units for images.
        attribute_encoder, attribute_decoder: Hidden units for attributes; of the decoder, 665 in the code and 660 in
            the paper.
        noise: One random number for each "sample", shared by its dimensions (the code), or one for each "dimension".
        deviation: What the noise is multiplied by: "exp(logvar)" (the code) or "exp(logvar/2)" (the formula).
        kl, cross, alignment: Weight of each term, and the epochs (of 100) between which it grows from 0. The paper has
            other rates: [0.234, 0, 90] for `kl`, [8.64, 6, 22] for `alignment`.
    """

    def __init__(
        self,
        in_features: int = 2048,
        latent: int = 64,
        encoder: int = 1560,
        decoder: int = 1660,
        attribute_encoder: int = 1450,
        attribute_decoder: int = 665,
        noise: str = "sample",
        deviation: str = "exp(logvar)",
        kl: Sequence[float] = (0.25, 0, 93),
        cross: Sequence[float] = (2.37, 21, 75),
        alignment: Sequence[float] = (8.13, 6, 22),
    ) -> None:
        super().__init__()
        require_positive(attribute_encoder=attribute_encoder, attribute_decoder=attribute_decoder)
        _require_one_of("noise", noise, ("sample", "dimension"))
        _require_one_of("deviation", deviation, ("exp(logvar)", "exp(logvar/2)"))
        self.encoder = VisualEncoder(in_features, encoder, latent)
        self.decoder = Decoder(latent, decoder, in_features)
        self.input_shape = (in_features,)
        self.latent = latent
        self._attribute_sizes = attribute_encoder, attribute_decoder
        self._noise, self._deviation = noise, deviation
        self._kl, self._cross = _warm_up("kl", kl), _warm_up("cross", cross)
        self._alignment = _warm_up("alignment", alignment)

    def attribute_vae(self, attributes: int) -> Vae:
        """A new autoencoder of attributes for the same latent space."""
        encoder, decoder = self._attribute_sizes
        made = Vae(Encoder(attributes, encoder, self.latent), Decoder(self.latent, decoder, attributes))
        return made.to(next(self.decoder.parameters()))

    def sample(self, gaussian: Gaussian) -> Tensor:
        """Draws latents by reparameterisation."""
        mu, logvar = gaussian
        noise = torch.randn_like(mu[:, :1] if self._noise == "sample" else mu)  # (B, 1) or (B, latent)
        return mu + noise * torch.exp(logvar if self._deviation == "exp(logvar)" else 0.5 * logvar)

    def loss(self, visual: Gaussian, x: Tensor, attribute_vae: Vae, a: Tensor, progress: float) -> Tensor:
        """The weighted loss after a fraction `progress` of the epochs, summed over the batch."""
        return self.total(self.terms(visual, x, attribute_vae, a, progress), progress)

    def terms(self, visual: Gaussian, x: Tensor, attribute_vae: Vae, a: Tensor, progress: float = 1.0) -> Terms:
        """The loss of images `x` (B, D), encoded as `visual`, and the attributes `a` (B, A) of their classes.

        The cross-reconstruction takes a third of a step. It is skipped, as 0, while its weight is 0.
        """
        semantic: Gaussian = attribute_vae.encoder(a)
        z_x, z_a = self.sample(visual), self.sample(semantic)
        if self._cross(progress):
            # One pass decodes both each latent and its counterpart from the other modality.
            own_x, cross_x = self.decoder(torch.cat([z_x, z_a])).chunk(2)
            own_a, cross_a = attribute_vae.decoder(torch.cat([z_a, z_x])).chunk(2)
            cross = _l1(cross_x, x) + _l1(cross_a, a)
        else:
            own_x, own_a, cross = self.decoder(z_x), attribute_vae.decoder(z_a), x.new_zeros(())
        (mu_x, logvar_x), (mu_a, logvar_a) = visual, semantic
        apart = (mu_x - mu_a).square().sum(1)
        apart = apart + (torch.exp(0.5 * logvar_x) - torch.exp(0.5 * logvar_a)).square().sum(1)  # (B,)
        return Terms(
            reconstruction=_l1(own_x, x) + _l1(own_a, a),
            kl=_kl(mu_x, logvar_x) + _kl(mu_a, logvar_a),
            cross=cross,
            alignment=apart.clamp(min=1e-30).sqrt().sum(),  # 2-Wasserstein distance; at 0 its gradient would be NaN
        )

    def total(self, terms: Terms, progress: float) -> Tensor:
        """The weighted terms after a fraction `progress` of the epochs."""
        return (
            terms.reconstruction
            + self._kl(progress) * terms.kl
            + self._cross(progress) * terms.cross
            + self._alignment(progress) * terms.alignment
        )


def _l1(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(a, b, reduction="sum")


def _kl(mu: Tensor, logvar: Tensor) -> Tensor:
    """KL divergence from the standard normal distribution."""
    return -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()


def _initialise(module: nn.Module) -> None:
    for layer in module.children():
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_uniform_(layer.weight, gain=0.5)
        nn.init.zeros_(layer.bias)


def _warm_up(name: str, values: Sequence[float]) -> WarmUp:
    if len(values) != 3 or not values[0] >= 0 or not values[1] < values[2]:
        raise UsageError(f"{name} must be [weight, first epoch, last epoch] such as [8.13, 6, 22], not {list(values)}")
    return WarmUp(*map(float, values))


def _require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
