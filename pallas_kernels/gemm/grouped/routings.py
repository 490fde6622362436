"""Random routings of tokens to experts, even or skewed, for checks and measurements."""

import numpy as np


def draw_routing(
    rng: np.random.Generator, tokens: int, experts: int, chosen: int, zipf: float = 0.0
) -> np.ndarray:
    """Return [T, e] int32: different experts for each token.

    zipf: expert i is drawn with weight (i + 1) ** -zipf; 0 draws all experts evenly.
    """
    log_odds = -zipf * np.log(np.arange(1, experts + 1))
    # The largest of log odds plus Gumbel noise are a draw without replacement.
    noisy = log_odds + rng.gumbel(size=(tokens, experts))
    return np.argsort(-noisy, axis=1)[:, :chosen].astype(np.int32)
