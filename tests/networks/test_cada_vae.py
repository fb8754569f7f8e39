"""CADA-VAE: its sizes, every term of its loss by another computation in double precision, and its warm-ups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.networks import CadaVae
from rkr.networks.cada_vae import Encoder, Terms

Array = NDArray[np.float64]
B, D, A, Z = 5, 7, 4, 3  # a batch, features, attributes, latent dimensions


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def small(**options: Any) -> CadaVae:
    torch.manual_seed(0)
    sizes = {"in_features": D, "latent": Z, "encoder": 6, "decoder": 8, "attribute_encoder": 5, "attribute_decoder": 9}
    return CadaVae(**{**sizes, **options})


def example() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.rand(B, D, generator=draw), torch.rand(B, A, generator=draw)


def test_sizes() -> None:
    """2048-1560-(64, 64) and 64-1660-2048 for images; A-1450-(64, 64) and 64-665-A for attributes."""
    network = CadaVae()
    assert count(network.encoder) == 2048 * 1560 + 1560 + 2 * (1560 * 64 + 64) == 3_396_248
    assert count(network.decoder) == 64 * 1660 + 1660 + 1660 * 2048 + 2048
    of_cub = network.attribute_vae(312)
    assert count(of_cub.encoder) == 312 * 1450 + 1450 + 2 * (1450 * 64 + 64)
    assert count(of_cub.decoder) == 64 * 665 + 665 + 665 * 312 + 312
    as_printed = CadaVae(attribute_decoder=660).attribute_vae(312)
    assert count(of_cub.decoder) - count(as_printed.decoder) == 5 * (64 + 1 + 312)
    assert (network.input_shape, network.latent) == ((2048,), 64)
    assert [name for name, _ in network.encoder.named_children()] == ["hidden", "mu", "logvar"]


def test_initial_values() -> None:
    """Xavier's uniform distribution with gain 0.5, biases 0."""
    network = small()
    for layer in (m for m in (*network.modules(), *network.attribute_vae(A).modules()) if isinstance(m, nn.Linear)):
        bound = 0.5 * math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.7 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()
    large = CadaVae().encoder.hidden.weight
    bound = 0.5 * math.sqrt(6 / (2048 + 1560))
    assert large.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert large.mean().abs().item() < 1e-4


# ---------------------------------------------------------------------------------------------------------
# The loss


def array(t: Tensor) -> Array:
    return t.detach().double().numpy()


def linear(layer: nn.Module, x: Array) -> Array:
    assert isinstance(layer, nn.Linear)
    return x @ array(layer.weight).T + array(layer.bias)


def encoded(encoder: nn.Module, x: Array) -> tuple[Array, Array]:
    assert isinstance(encoder, Encoder)
    h = np.maximum(linear(encoder.hidden, x), 0)
    return linear(encoder.mu, h), linear(encoder.logvar, h)


def decoded(decoder: Any, z: Array) -> Array:
    return linear(decoder.out, np.maximum(linear(decoder.hidden, z), 0))


def kl_of(mu: Array, logvar: Array) -> float:
    """KL(N(mu, s²) ‖ N(0, 1)) = log(1 / s) + (s² + mu²) / 2 - 1 / 2, number by number."""
    total = 0.0
    for m, v in zip(mu.ravel().tolist(), logvar.ravel().tolist(), strict=True):
        s = math.exp(v / 2)
        total += -math.log(s) + (s * s + m * m) / 2 - 0.5
    return total


def reference(network: CadaVae, vae: Any, x: Array, a: Array, noise: tuple[Array, Array], half: bool) -> list[float]:
    """Reconstruction, KL, cross-reconstruction and alignment, in the order of `Terms`."""
    (mu_x, lv_x), (mu_a, lv_a) = encoded(network.encoder, x), encoded(vae.encoder, a)
    z_x = mu_x + noise[0] * np.exp(lv_x / 2 if half else lv_x)
    z_a = mu_a + noise[1] * np.exp(lv_a / 2 if half else lv_a)
    own = np.abs(decoded(network.decoder, z_x) - x).sum() + np.abs(decoded(vae.decoder, z_a) - a).sum()
    cross = np.abs(decoded(network.decoder, z_a) - x).sum() + np.abs(decoded(vae.decoder, z_x) - a).sum()
    # The 2-Wasserstein distance of Gaussians with diagonal covariances: means and standard deviations side by side.
    gap = np.hstack([mu_x - mu_a, np.exp(lv_x / 2) - np.exp(lv_a / 2)])
    return [own, kl_of(mu_x, lv_x) + kl_of(mu_a, lv_a), cross, np.linalg.norm(gap, axis=1).sum()]


@pytest.mark.parametrize("noise", ["sample", "dimension"])
@pytest.mark.parametrize("deviation", ["exp(logvar)", "exp(logvar/2)"])
def test_every_term(noise: str, deviation: str) -> None:
    network = small(noise=noise, deviation=deviation)
    vae = network.attribute_vae(A)
    for p in (*network.parameters(), *vae.parameters()):
        nn.init.normal_(p, std=0.5)
    x, a = example()
    torch.manual_seed(7)
    found = network.terms(network.encoder(x), x, vae, a)
    torch.manual_seed(7)
    width = 1 if noise == "sample" else Z
    drawn = torch.randn(B, width), torch.randn(B, width)
    half = deviation == "exp(logvar/2)"
    expected = reference(network, vae, array(x), array(a), (array(drawn[0]), array(drawn[1])), half)
    terms = [found.reconstruction, found.kl, found.cross, found.alignment]
    assert [t.item() for t in terms] == pytest.approx(expected, rel=1e-5)
    assert all(t.dim() == 0 for t in terms)
    for progress in (0.0, 0.3, 0.5, 0.99):
        weights = [1.0, network._kl(progress), network._cross(progress), network._alignment(progress)]
        total = sum(w * e for w, e in zip(weights, expected, strict=True))
        assert network.total(found, progress).item() == pytest.approx(total, rel=1e-5)


def test_what_has_no_weight_yet_is_not_computed() -> None:
    """Before epoch 21 of 100 the cross-reconstruction counts for nothing: the same loss and gradients without it."""
    network = small().double()
    vae = network.attribute_vae(A)
    x, a = (t.double() for t in example())
    parameters = [*network.parameters(), *vae.parameters()]
    found = []
    for at in (0.2, 1.0):  # as the 20th epoch does it, and with everything computed
        torch.manual_seed(7)
        terms = network.terms(network.encoder(x), x, vae, a, at)
        assert (terms.cross.item() > 0) is (at == 1)
        loss = network.total(terms, 0.2)
        found.append([loss.detach(), *torch.autograd.grad(loss, parameters)])
    for short, whole in zip(*found, strict=True):
        torch.testing.assert_close(short, whole, rtol=1e-12, atol=1e-12)
    assert network.terms(network.encoder(x), x, vae, a, 0.22).cross > 0


def test_terms_are_sums_over_samples() -> None:
    """Twice the batch, twice every term, whatever is drawn: there is no noise where the deviation is nothing."""
    network = small()
    vae = network.attribute_vae(A)
    for encoder in (network.encoder, vae.encoder):
        encoder.logvar.weight.data.zero_()
        encoder.logvar.bias.data.fill_(-80)
    x, a = example()
    once = network.terms(network.encoder(x), x, vae, a)
    twice = network.terms(network.encoder(x.repeat(2, 1)), x.repeat(2, 1), vae, a.repeat(2, 1))
    for name in ("reconstruction", "kl", "cross", "alignment"):
        assert getattr(twice, name).item() == pytest.approx(2 * getattr(once, name).item(), rel=1e-5)


def test_one_pass_decodes_what_four_would() -> None:
    network = small()
    vae = network.attribute_vae(A)
    x, a = example()
    gaussians = network.encoder(x), vae.encoder(a)
    torch.manual_seed(3)
    z_x, z_a = map(network.sample, gaussians)
    torch.manual_seed(3)
    found = network.terms(gaussians[0], x, vae, a)
    own = (network.decoder(z_x) - x).abs().sum() + (vae.decoder(z_a) - a).abs().sum()
    cross = (network.decoder(z_a) - x).abs().sum() + (vae.decoder(z_x) - a).abs().sum()
    assert torch.allclose(found.reconstruction, own, rtol=1e-6)
    assert torch.allclose(found.cross, cross, rtol=1e-6)
    assert not torch.allclose(own, cross, rtol=1e-3)


def test_equal_gaussians_have_a_gradient() -> None:
    """The slope of a root at 0 is infinite: features and attributes that are all 0 must not turn it into NaN."""
    network = small()
    vae = network.attribute_vae(A)
    x, a = torch.zeros(B, D), torch.zeros(B, A)
    found = network.terms(network.encoder(x), x, vae, a).alignment
    assert found.item() < 1e-12
    found.backward()
    gradients = [p.grad for p in (*network.parameters(), *vae.parameters()) if p.grad is not None]
    assert len(gradients) == 12  # of both encoders
    assert not any(g.any() for g in gradients)


# ---------------------------------------------------------------------------------------------------------
# Noise


def test_noise_of_a_sample_is_one_number() -> None:
    mu, logvar = torch.zeros(2000, Z), torch.log(torch.tensor([0.5, 1.0, 2.0])).expand(2000, Z)
    torch.manual_seed(0)
    shared = small(noise="sample").sample((mu, logvar))
    eps = shared / torch.tensor([0.5, 1.0, 2.0])
    assert torch.allclose(eps, eps[:, :1].expand(-1, Z), rtol=1e-6)
    assert len(eps[:, 0].unique()) == 2000
    torch.manual_seed(0)
    apart = small(noise="dimension").sample((mu, logvar)) / torch.tensor([0.5, 1.0, 2.0])
    correlation = torch.corrcoef(apart.T) - torch.eye(Z)
    assert correlation.abs().max() < 0.1
    for drawn in (eps, apart):
        assert drawn.std(0).tolist() == pytest.approx([1.0] * Z, abs=0.06)


def test_deviation() -> None:
    """exp(logvar) is the variance taken for a deviation, as the authors' code has it; exp(logvar / 2) is right."""
    mu, logvar = torch.full((B, Z), 2.0), torch.full((B, Z), math.log(9.0))
    found = {}
    for deviation in ("exp(logvar)", "exp(logvar/2)"):
        network = small(deviation=deviation)
        torch.manual_seed(5)
        found[deviation] = network.sample((mu, logvar)) - 2
    assert torch.allclose(found["exp(logvar)"], 3 * found["exp(logvar/2)"], rtol=1e-5)
    torch.manual_seed(5)
    small()
    torch.manual_seed(5)
    assert torch.allclose(found["exp(logvar/2)"], 3 * torch.randn(B, 1).expand(B, Z), rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# Warm-ups

# By epoch of 100: weights of KL (0.25 from 0 to 93), of cross-reconstruction (2.37 from 21 to 75) and of alignment
# (8.13 from 6 to 22).
WEIGHTS = {
    0: (0, 0, 0),
    6: (0.25 * 6 / 93, 0, 0),
    14: (0.25 * 14 / 93, 0, 8.13 / 2),
    21: (0.25 * 21 / 93, 0, 8.13 * 15 / 16),
    22: (0.25 * 22 / 93, 2.37 / 54, 8.13),
    48: (0.25 * 48 / 93, 2.37 / 2, 8.13),
    75: (0.25 * 75 / 93, 2.37, 8.13),
    93: (0.25, 2.37, 8.13),
    99: (0.25, 2.37, 8.13),
}


def weights(network: CadaVae, progress: float) -> tuple[float, ...]:
    """What `total` multiplies each term by."""
    nothing, one = torch.zeros(()), torch.ones(())
    parts = [Terms(nothing, *(one if i == j else nothing for j in range(3))) for i in range(3)]
    assert network.total(Terms(one, nothing, nothing, nothing), progress).item() == 1
    return tuple(network.total(terms, progress).item() for terms in parts)


@pytest.mark.parametrize("epoch", WEIGHTS)
def test_warm_ups(epoch: int) -> None:
    assert weights(small(), epoch / 100) == pytest.approx(WEIGHTS[epoch], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("epochs", [10, 50, 200, 1000])
def test_warm_ups_of_other_lengths_are_in_proportion(epochs: int) -> None:
    for epoch in range(0, epochs, max(1, epochs // 20)):
        e = 100 * epoch / epochs
        clipped = [np.clip((e - start) / (end - start), 0, 1) for start, end in ((0, 93), (21, 75), (6, 22))]
        expected = [w * c for w, c in zip((0.25, 2.37, 8.13), clipped, strict=True)]
        assert weights(small(), epoch / epochs) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_paper_s_own_rates() -> None:
    """It grows by 0.0026 and 0.54 an epoch there."""
    network = small(kl=[0.234, 0, 90], alignment=[8.64, 6, 22])
    kl, _, alignment = weights(network, 0.07)
    assert (kl, alignment) == pytest.approx((7 * 0.0026, 0.54), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "none"}, "noise must be 'sample' or 'dimension', not 'none'"),
        ({"deviation": "logvar"}, r"deviation must be 'exp\(logvar\)' or 'exp\(logvar/2\)', not 'logvar'"),
        ({"kl": [1, 2]}, r"kl must be \[weight, first epoch, last epoch\] such as .*, not \[1, 2\]"),
        ({"cross": (1, 5, 5)}, r"cross must be .* not \[1, 5, 5\]"),
        ({"alignment": (-1, 0, 5)}, r"alignment must be .* not \[-1, 0, 5\]"),
        ({"kl": (math.nan, 0, 5)}, r"kl must be .* not \[nan, 0, 5\]"),
        ({"latent": 0}, "latent must be"),
        ({"in_features": -1}, "in_features must be"),
        ({"encoder": 0}, "hidden must be"),
        ({"attribute_encoder": 0}, "attribute_encoder must be"),
        ({"attribute_decoder": 0}, "attribute_decoder must be"),
    ],
)
def test_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        small(**options)


def test_attribute_vaes_are_new_and_of_the_network_s_kind() -> None:
    network = small().double()
    first, second = network.attribute_vae(A), network.attribute_vae(2)
    assert next(first.parameters()).dtype == torch.float64
    assert not set(map(id, first.parameters())) & set(map(id, second.parameters()))
    assert not [name for name, _ in network.named_parameters() if "attribute" in name]
    assert second.decoder(torch.zeros(1, Z, dtype=torch.float64)).shape == (1, 2)
