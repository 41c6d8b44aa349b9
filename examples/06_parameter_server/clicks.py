"""A generated click log: users, items, and whether the user clicked.

It has properties of real logs: a few users and items are in most of the lines (Zipf), clicks are rare, and they depend on
hidden preferences of each user and item, on the hour, and on chance.
"""

import numpy as np
import torch

USERS, ITEMS, HOURS = 20_000, 5_000, 24


class Clicks(torch.utils.data.Dataset):
    """Lines of (ids of user, item and hour, in one numbering; three numbers; 1.0 if clicked, else 0.0)."""

    def __init__(self, lines: int, seed: int = 1):
        tastes = np.random.default_rng(0)  # the same preferences for training and test
        user_taste, item_taste = tastes.standard_normal((USERS, 4)), tastes.standard_normal((ITEMS, 4))
        popular = tastes.standard_normal(ITEMS) - 2.0
        draw = np.random.default_rng(seed)
        users, items = draw.zipf(1.3, lines) % USERS, draw.zipf(1.3, lines) % ITEMS
        hours = draw.integers(0, HOURS, lines)
        numbers = draw.standard_normal((lines, 3))
        score = (
            (user_taste[users] * item_taste[items]).sum(1) + popular[items] + 0.5 * np.cos(hours / HOURS * 6.28) + numbers[:, 0]
        )
        self.ids = torch.from_numpy(np.stack([users, USERS + items, USERS + ITEMS + hours], 1))
        self.numbers = torch.from_numpy(numbers.astype(np.float32))
        self.clicked = torch.from_numpy((draw.random(lines) < 1 / (1 + np.exp(-score))).astype(np.float32))

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, k):
        return self.ids[k], self.numbers[k], self.clicked[k]


IDS = USERS + ITEMS + HOURS
