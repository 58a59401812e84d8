"""What is owed after a step."""

import numpy as np

from reference.basics import Delivery, Floats


class NoMemory:
    """Of all ranks. `plain`: everything is sent, and a memory that is an estimate starts anew."""

    estimates = False
    started = True
    remembers = False
    masks = True  # what was sent does not drift

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        self.together = together
        self.zeros = [np.zeros(n, np.float32) for _ in range(ranks)]

    @property
    def owed(self) -> list[Floats]:
        return self.zeros

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        """What the gradients add to what is pending."""
        return [np.float32(1 / loss_scale) * mine for mine in gradient]

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        return self.change(gradient, loss_scale, plain)

    def drift(self, rank: int) -> Floats | None:
        """What it gains by itself until the next step; None if nothing."""
        return None

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        """Returns the mean that everyone applies."""
        return delivery.total / np.float32(len(pending))


class Residual(NoMemory):
    remembers = True

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        super().__init__(ranks, n, together)
        self.debts = self.zeros

    @property
    def owed(self) -> list[Floats]:
        return self.debts

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scaled = super().pending(gradient, loss_scale, plain)
        return [debt + mine for debt, mine in zip(self.debts, scaled, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        self.debts = [had - gone for had, gone in zip(pending, delivery.settled, strict=True)]
        return super().commit(pending, delivery, plain)


class EF21(NoMemory):
    """2106.05203. With a support shared by all ranks, the mean stands for every own estimate."""

    estimates = True
    remembers = True  # what is not sent is part of the next difference

    def __init__(self, ranks: int, n: int, together: bool, **_: float) -> None:
        super().__init__(ranks, n, together)
        self.started = n == 0
        self.estimate, self.mean = self.zeros, np.zeros(n, np.float32)

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scaled = super().pending(gradient, loss_scale, plain)
        own = self.zeros if plain else self.estimate
        return [mine - estimate for mine, estimate in zip(scaled, own, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        if plain:
            self.estimate, self.mean = self.zeros, self.zeros[0]
        self.started = True
        self.mean = self.mean + super().commit(pending, delivery, plain)
        self.estimate = [
            self.mean if self.together else mine + settled
            for mine, settled in zip(self.estimate, delivery.settled, strict=True)
        ]
        return self.mean


class EF21M(EF21):
    """2305.15155. h, the running mean, is what was to be sent plus the estimate."""

    def __init__(self, ranks: int, n: int, together: bool, eta: float = 0.1) -> None:
        super().__init__(ranks, n, together)
        self.eta = np.float32(eta)
        self.base = self.zeros  # (1 - eta) h - estimate

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scale = (np.float32(1) if plain else self.eta) / np.float32(loss_scale)
        return [scale * mine for mine in gradient]

    def pending(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        bases = self.zeros if plain else self.base
        changes = self.change(gradient, loss_scale, plain)
        return [base + mine for base, mine in zip(bases, changes, strict=True)]

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        before = self.zeros if plain else self.estimate
        h = [had + estimate for had, estimate in zip(pending, before, strict=True)]
        mean = super().commit(pending, delivery, plain)
        keep = np.float32(1) - self.eta
        self.base = [keep * mine - own for mine, own in zip(h, self.estimate, strict=True)]
        return mean


class Momentum(Residual):
    """1712.01887: what piles up is the velocity of SGD with momentum."""

    def __init__(
        self,
        ranks: int,
        n: int,
        together: bool,
        momentum: float = 0.9,
        form: str = "plain",
        masking: str = "on",
    ) -> None:
        super().__init__(ranks, n, together)
        self.momentum = np.float32(momentum)
        plain = form == "plain"
        self.scale = np.float32(1) if plain else 1 + self.momentum
        self.push = np.float32(1) if plain else self.momentum / (1 + self.momentum)
        self.masks = masking == "on"
        self.velocity = self.zeros

    def change(self, gradient: list[Floats], loss_scale: float, plain: bool) -> list[Floats]:
        scale = self.scale / np.float32(loss_scale)
        self.changes = [scale * mine for mine in gradient]
        return self.changes

    def drift(self, rank: int) -> Floats:
        change = self.changes[rank]
        speed = self.momentum * self.velocity[rank] + self.push * change
        return self.momentum * speed

    def commit(self, pending: list[Floats], delivery: Delivery, plain: bool) -> Floats:
        self.velocity = [
            self.momentum * speed + self.push * change
            for speed, change in zip(self.velocity, self.changes, strict=True)
        ]
        mean = super().commit(pending, delivery, plain)
        if self.masks and not delivery.whole:
            for speed, settled in zip(self.velocity, delivery.settled, strict=True):
                speed[settled != 0] = 0
        self.debts = [
            unsent + self.momentum * speed
            for unsent, speed in zip(self.debts, self.velocity, strict=True)
        ]
        return mean
