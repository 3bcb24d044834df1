# SPDX-License-Identifier: Apache-2.0
"""What a run protects, how much, and according to whom."""

import dataclasses
import importlib.metadata
import math
from typing import Any

from jaxfed import _validate
from jaxfed.privacy import accounting, composition

__all__ = ["PrivacyStatement", "make_statement"]

_ADJACENCY = {
    "example": "replace one example of one client",
    "client": "replace one client's whole data",
}
_PROTECTED = {
    "example": "any one example of any one client",
    "client": "all data of any one client",
}
_AGAINST = {
    "local": "everybody who sees that client's messages, the server included",
    "central": "everybody who sees what the server publishes; the server is trusted",
}
_CAVEATS = (
    "Whoever holds the run folder (seed, un-noised client state, a digest of the data) "
    "can remove the noise.",
    "The noise is sampled in float32 and is not hardened against "
    "floating-point attacks.",
    "Training loss, influence and whatever else a run logs of its clients are computed "
    "without noise and not covered.",
    "The nominal epsilon is what a paper's formula calls this noise level; only the "
    "certified epsilon is a guarantee.",
)
_HOW = {
    "pld": "privacy loss distributions of sub-sampled Gaussians",
    "rdp": "Rényi divergences of sub-sampled Gaussians",
}
_ASSERTED = (
    "The sensitivity was given by name and is not proven here: the certified epsilon "
    "holds only if it does."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """The privacy of one run, in full. Build it with :func:`make_statement`.

    Attributes:
      unit: what is protected, "example" or "client".
      adjacency: the neighbouring relation in words.
      model: "local", "central", or "none" when nothing is protected.
      mechanism: what is clipped and where noise is added, in words.
      clip_norm: clip radius of one example or one client, inf if not clipped.
      noise_std: standard deviation per coordinate of the noised vector.
      sensitivity: L2 sensitivity of that vector in one round, inf if unbounded.
      sensitivity_mode: "tight": derived for what is computed; "paper": the printed
        bound; "asserted": a number given by name, which nobody has checked.
      rounds: number of noised releases.
      sampling: how examples and clients are drawn, in words.
      delta: failure probability of both epsilons.
      epsilon_nominal: what a paper's formula calls this noise; not a guarantee.
      nominal_formula: whose formula that is.
      epsilon_certified: what the accountant certifies for all rounds together.
      accountant: who certifies, with version.
      adversary: what the simulated attackers saw, and whether the privacy model allows
        it, in words.
      tuned_on_private_data: whether hyperparameters were, in words.
      caveats: what the numbers do not cover, one sentence each.
    """

    unit: str
    adjacency: str
    model: str
    mechanism: str
    clip_norm: float
    noise_std: float
    sensitivity: float
    sensitivity_mode: str
    rounds: int
    sampling: str
    delta: float
    epsilon_nominal: float
    nominal_formula: str
    epsilon_certified: float
    accountant: str
    adversary: str
    tuned_on_private_data: str
    caveats: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as text, numbers and lists, for JSON and TOML.

        An infinite number becomes the text ``"inf"``, since JSON cannot hold one;
        ``float`` reads it back.
        """
        fields = dataclasses.asdict(self)
        fields["caveats"] = list(self.caveats)
        for name, value in fields.items():
            if isinstance(value, float) and math.isinf(value):
                fields[name] = "inf"
        return fields

    def text(self) -> str:
        """Return the statement as a few plain lines, without a final newline."""
        if self.model == "none":
            head = ["Privacy: no privacy. Nothing below is protected."]
        else:
            head = [
                f"Privacy: {self.unit}-level {self.model} differential privacy",
                f"  protected: {_PROTECTED[self.unit]} ({self.adjacency})",
                f"  against: {_AGAINST[self.model]}",
            ]
        body = [
            f"  certified epsilon {self.epsilon_certified:.4g} at delta "
            f"{self.delta:.4g} ({self.accountant})",
            f"  nominal epsilon {self.epsilon_nominal:.4g} ({self.nominal_formula}'s "
            "formula, not a guarantee)",
            f"  mechanism: {self.mechanism}; clip norm {self.clip_norm:.4g}, noise std "
            f"{self.noise_std:.4g}, sensitivity {self.sensitivity:.4g} "
            f"({self.sensitivity_mode}), {self.rounds} rounds",
            f"  sampling: {self.sampling}",
            f"  simulated adversary: {self.adversary}",
            f"  tuned on private data: {self.tuned_on_private_data}",
        ]
        notes = [f"  note: {caveat}" for caveat in self.caveats]
        return "\n".join(head + body + notes)


def make_statement(
    *,
    unit: str,
    clip_norm: float,
    noise_std: float,
    sensitivity: float,
    rounds: int,
    delta: float,
    sampling_rate: float = 1.0,
    sampling_text: str,
    mechanism: str,
    credited: composition.Sampling = composition.ALL,
    model: str = "local",
    epsilon_nominal: float | None = None,
    nominal_formula: str = "Byz-Clip21-SGD2M",
    sensitivity_mode: str = "tight",
    attackers: int = 0,
    attackers_see_messages: bool = True,
    tuned_on_private_data: str = "not by this run; tuning elsewhere is not counted",
    more_caveats: tuple[str, ...] = (),
) -> PrivacyStatement:
    """Account for one run and say what it protects.

    Args:
      unit: "example" or "client".
      clip_norm: clip radius, > 0; inf if nothing is clipped.
      noise_std: standard deviation per coordinate of the noised vector, >= 0.
      sensitivity: L2 sensitivity of that vector in one round, > 0; inf if unbounded.
        ``2 * clip_norm`` for one clipped message per client, ``2 * clip_norm / m`` for
        a mean over ``m`` clipped examples.
      rounds: number of noised releases, >= 0.
      delta: failure probability, 0 < delta < 1.
      sampling_rate: q of :func:`~jaxfed.privacy.accounting.nominal_epsilon`, in (0, 1];
        it touches the nominal epsilon only.
      sampling_text: how examples and clients are drawn.
      mechanism: what is clipped and where noise is added.
      credited: the draw of units that the certified epsilon may count on; none by
        default.
      model: "local" or "central". The statement says "none" if nothing is protected.
      epsilon_nominal: the paper's name for this noise, if it is another than
        ``nominal_epsilon(noise_std, sensitivity / 2, delta, rounds)``: ``sensitivity /
        2`` is the norm of one unit's share in the noised vector, which is ``clip_norm``
        for unit "client".
      nominal_formula: whose name that is.
      sensitivity_mode: "tight", "paper" or "asserted".
      attackers: number of simulated Byzantine clients, >= 0.
      attackers_see_messages: whether they use the honest messages of a round.
      tuned_on_private_data: whether hyperparameters were, in words.
      more_caveats: what else the numbers of this run do not cover.

    Returns:
      The statement. No privacy is claimed if ``noise_std`` is 0, if ``sensitivity`` or
      ``clip_norm`` is inf, or if no finite epsilon can be certified.

    Raises:
      TypeError: a number is not a plain number, or ``rounds`` not an integer.
      ValueError: an argument is outside its range.
      ImportError: there is noise to account for and dp-accounting is not installed.

    Example:
      >>> statement = make_statement(
      ...     unit="client", clip_norm=1.0, noise_std=29.48455, sensitivity=2.0,
      ...     rounds=1000, delta=4e-4, sampling_text="all clients every round",
      ...     mechanism="clipped difference plus Gaussian noise at each client")
      >>> round(statement.epsilon_nominal, 3), round(statement.epsilon_certified, 3)
      (3.0, 8.895)
    """
    _choice("unit", unit, _ADJACENCY)
    _choice("model", model, _AGAINST)
    _choice("sensitivity_mode", sensitivity_mode, ("tight", "paper", "asserted"))
    clip_norm = float(_validate.positive("clip_norm", clip_norm, finite=False))
    # Checks the other numbers as well, and needs no library where there is no noise.
    certified = accounting.certified_epsilon(noise_std, sensitivity, delta, rounds)
    if credited != composition.ALL and math.isfinite(certified):
        phase = composition.Phase(rounds, noise_std / sensitivity, credited)
        by = composition.accountant_for(credited, rounds, delta)
        drawn = composition.epsilon(phase, delta, accountant=by)
        certified = min(certified, drawn)
    noise_std, sensitivity = float(noise_std), float(sensitivity)
    if math.isinf(clip_norm) and math.isfinite(sensitivity):
        raise ValueError(
            "sensitivity must be inf when clip_norm is inf, got "
            f"sensitivity={sensitivity}. Clip, or give clip_norm the bound that holds."
        )
    # The formula is linear in the clip norm, so an infinite one needs no case.
    nominal = accounting.nominal_epsilon(
        noise_std, 1.0, delta, rounds, sampling_rate=sampling_rate
    )
    nominal = nominal * sensitivity / 2 if rounds else 0.0
    if epsilon_nominal is not None:
        nominal = float(
            _validate.nonnegative("epsilon_nominal", epsilon_nominal, finite=False)
        )

    caveats = (*_CAVEATS, *more_caveats)
    if sensitivity_mode == "asserted":
        caveats = (_ASSERTED, *caveats)
    if noise_std == 0:
        model, caveats = "none", ("No privacy: no noise is added.",)
    elif math.isinf(sensitivity):
        model, caveats = "none", ("No privacy: nothing bounds what is noised.",)
    elif math.isinf(certified):
        model, caveats = "none", ("No privacy: the noise is too small to count.",)
    accountant = "nothing to account for"
    if model != "none" and rounds:
        version = importlib.metadata.version("dp-accounting")
        how = "exact Gaussian composition"
        if credited != composition.ALL:
            how = _HOW[composition.accountant_for(credited, rounds, delta)]
        accountant = f"dp-accounting {version}, {how}"
    return PrivacyStatement(
        unit=unit,
        adjacency=_ADJACENCY[unit],
        model=model,
        mechanism=mechanism,
        clip_norm=clip_norm,
        noise_std=noise_std,
        sensitivity=sensitivity,
        sensitivity_mode=sensitivity_mode,
        rounds=int(rounds),
        sampling=f"{sampling_text}; {_credit(credited)}",
        delta=float(delta),
        epsilon_nominal=nominal,
        nominal_formula=nominal_formula,
        epsilon_certified=certified,
        accountant=accountant,
        adversary=_adversary(model, attackers, attackers_see_messages),
        tuned_on_private_data=tuned_on_private_data,
        caveats=caveats,
    )


def _credit(credited):
    if credited == composition.ALL:
        return "amplification by sub-sampling is not credited"
    return f"the draw is credited ({credited.describe()}) and must stay secret"


def _adversary(model, attackers, see_messages):
    if not attackers:
        return "none"
    who = f"{attackers} Byzantine client{'s' if attackers > 1 else ''}"
    if not see_messages:
        return f"{who} that saw their own data and what is published"
    if model == "none":
        return f"{who} that saw the honest messages, which nothing hides"
    if model == "local":
        return f"{who} that saw the noised messages, as the privacy model allows"
    return (
        f"{who} that saw honest messages before the noise: more than the privacy model "
        "allows, so the run tests robustness; the epsilon does not cover this adversary"
    )


def _choice(name, value, known):
    if value not in known:
        options = " or ".join(repr(option) for option in known)
        raise ValueError(f"{name} must be {options}, got {name}={value!r}.")
