"""CADA-VAE (Schoenfeld et al., CVPR 2019), which the paper's zero-shot experiments rectify."""

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.networks._arguments import require_positive


class VisualEncoder(nn.Module):
    """Image features to the mean and log-variance of a Gaussian in the latent space.

    "Task Incremental Learning Experiments (Generalized Zero-Shot Setting)" (RKR, CVPR 2021) rectifies this
    part of CADA-VAE and counts only its memory. Mean and log-variance come from two separate layers: a single
    layer of twice the width has as many parameters, but would not give the paper's figures for rectification.
    """

    def __init__(self, in_features: int = 2048, hidden: int = 1560, latent: int = 64) -> None:
        super().__init__()
        require_positive(in_features=in_features, hidden=hidden, latent=latent)
        self.input_shape = (in_features,)
        self.hidden = nn.Linear(in_features, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        for layer in (self.hidden, self.mu, self.logvar):
            nn.init.xavier_uniform_(layer.weight, gain=0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.hidden(x))  # (B, hidden)
        return self.mu(h), self.logvar(h)  # (B, latent) each
