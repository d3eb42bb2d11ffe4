"""Whether to trust an approximation, in plain words.

Every finding is Good, Fair or Bad, and the worst of them is the verdict:

    Bad     the fit failed, or the ELBO is not finite; the target is nan or +inf at more than a
            hundredth of the draws, or not finite at more than a tenth
    Bad     another region holds more than a hundredth of the mass, or less, but so far out that a
            standard deviation is half as large again, or more
    Bad     k-hat of 0.7 or more, or one that cannot be told: the variances are not to be trusted,
            nor any correction of them; only Fair, if the KL is as small as for Good, where it is at
            most 1 and the weighted draws are worth four fifths of all; or, where the tails are as
            light as for Good or were not looked at, it is within one standard error of 0.7 (0.17
            for a thousand draws), or the weighted draws are worth 98 % of all (95 % where tails
            were looked at): then few weights are in the tail, and the largest of a thousand tell
            nothing of its shape
    Bad     tails: the target has a hundredth of its mass where a Gaussian q has 1e-4 (`iblr.tails`)
    Bad     a mean is off by more than half a standard deviation, or a standard deviation by more
            than half of itself
    Bad     KL(q || p) above 0.5 nats, or above 0.05 for every coordinate if that is more (*)
    Fair    k-hat between 0.5 and 0.7: averages over draws converge, but slowly; not where the
            weighted draws are worth 98 % of all, the KL is small and tails are light, since k-hat
            of nearly constant weights is noise
    Fair    tails: the target has 0.25 % of its mass where a Gaussian q has 1e-4
    Fair    log p is rounded to so few digits that nothing can be told; or it is rounded to more
            than a nat where it seems to be larger, and rounding decides, or is a hundred times that
            where q is
    Fair    a mean is off by more than a tenth of a standard deviation, a standard deviation by more
            than a tenth of itself, or a marginal probability by more than 0.05
    Fair    KL(q || p) above 0.1 nats, or above 0.01 for every coordinate if that is more (*)
    Fair    the best member of the family may be more than 0.1 nats better: `gap_bound`; or that is
            not known, since a budget was spent
    Fair    the fit was interrupted (Bad if that was before the verdict), or refused many steps; a
            draw at which the target is nan, or zero
    Fair    other modes were not looked for, or not from all starts: weights cannot see one in which
            q has no draws; or one makes a standard deviation larger by a tenth
    Good    none of these

The bands of k-hat are those of Vehtari et al. (2024) and of Yao et al. (2018). A KL of 0.01 nats in
one direction is a mean off by 0.14 standard deviations, or a standard deviation off by 10 %; 0.05
nats are 0.32 and 25 %. It is counted by coordinates because it adds up over directions, while what
users read off a posterior are few of them at a time; 0.1 nats in all bound every error of a
probability by sqrt(0.1 / 2) = 0.22, wherever it comes from. (*) Counted so only where log w looks
like a sum of many small terms: then it is normal with a variance of 2 KL, and the effective sample
size is that share exp(-2 KL) of the draws, here between 0.6 and 1.1 times. One heavy tail makes it
less, one direction in which q is wide and wrong more. What is said of means, standard
deviations and probabilities is what is beyond Monte Carlo noise, at 95 % over all scalars together.

All of them are needed. q over two modes at distance 4 has a k-hat below zero; only the KL and the
probabilities show it. With heavy tails the KL seen is small and k-hat large. With q on one of two
modes far apart everything is perfect, but for a look from dispersed starts.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from iblr.diagnosis import COARSE, GOOD_SPREAD, LARGEST_MODE, Diagnosis, Mode
from iblr.importance import LARGEST_KHAT, Importance
from iblr.status import Status, describe

GOOD_KHAT = 0.5
GOOD_OUTSIDE, LARGEST_OUTSIDE = 0.0025, 0.01
GOOD_SHIFT, LARGEST_SHIFT = 0.1, 0.5
LARGEST_SPREAD = math.log(1.5)
GOOD_SHAPE = 0.05
GOOD_KL, GOOD_KL_EACH = 0.1, 0.01
LARGEST_KL, LARGEST_KL_EACH = 0.5, 0.05
MANY_SMALL_TERMS = (0.6, 1.1)
GOOD_GAP = 0.1
AROUND = 1.0  # standard deviations of q
LARGEST_SHARE_UNDEFINED, LARGEST_SHARE_EXCLUDED = 0.01, 0.1
NEARLY_ALL, MOST, ALL_BUT_FEW = 0.8, 0.95, 0.98
NO_MEAN = 1.0  # k-hat beyond which weights have no mean
MANY_TIMES = 20  # what coarse values of log p may add up to, in units of their rounding
GRADES = ("Bad", "Fair", "Good")

MIXTURE = "try `iblr.GaussianMixture` or NUTS from here (`posterior.to_nuts()`)"
CORRECTED = "use `posterior.corrected`, which weights have put right"


class Finding(NamedTuple):
    """One reason for a grade, and what to do about it."""

    grade: str
    reason: str
    advice: str = ""


def judge(diagnosis: Diagnosis, status: Status = Status.ok, gap_bound: float = math.nan) -> str:
    """The verdict in words; it begins with Good, Fair or Bad.

    Args:
        diagnosis: what is known about q.
        status: how the fit ended.
        gap_bound: nats that q may be below the best member of its family; nan where unknown.
    """
    found = findings(diagnosis, status, gap_bound)
    grade = next((g for g in GRADES if any(f.grade == g for f in found)), "Good")
    decisive = [f for f in found if f.grade == grade]
    numbers = _numbers(diagnosis)
    if grade == "Good":
        return f"Good: {numbers}; no other mode found from {_starts(diagnosis)}."
    reasons = [f.reason for f in decisive]
    advice = [f.advice for f in decisive if f.advice][:1]
    return f"{grade}: {'; '.join([*reasons, numbers, *advice])}."


def findings(diagnosis: Diagnosis, status: Status, gap_bound: float) -> list[Finding]:
    """Everything that speaks against q, the gravest of each kind first."""
    seen, found = diagnosis.importance, []
    found += _of_status(status)
    found += _of_values(seen)
    found += _of_modes(diagnosis)
    if not math.isfinite(seen.elbo):
        return found
    if seen.resolution > COARSE and seen.kl < MANY_TIMES * seen.resolution:
        found.append(
            Finding(
                "Fair",
                f"log p is rounded to {seen.resolution:.2g} nats, so that weights tell nothing",
                "leave out constants of the log density, or compute in float64",
            )
        )
    else:
        of_kl, of_tails = _of_kl(seen, diagnosis.dim), _of_tails(diagnosis.outside)
        if not any(f.grade == "Bad" for f in of_tails):  # which say what k-hat would
            found += _of_weights(seen, not of_kl, not of_tails, not math.isnan(diagnosis.outside))
        found += of_tails
        found += _of_moves(diagnosis)
        found += of_kl
    if bool(jnp.all(status == Status.out_of_budget)) and math.isnan(gap_bound):
        reason = "how far it is from the best member of the family is not known"
        found.append(Finding("Fair", reason, "fit on, with a larger budget"))
    if gap_bound > GOOD_GAP:
        found.append(
            Finding(
                "Fair",
                f"the best member of the family may be {gap_bound:.2g} nats better",
                "fit on, with a larger budget",
            )
        )
    if diagnosis.climbs == 0:
        found.append(
            Finding(
                "Fair",
                "other modes were not looked for, and weights cannot see them",
                diagnosis.unlooked,
            )
        )
    elif diagnosis.left_out:
        planned = diagnosis.climbs + diagnosis.left_out
        reason = f"other modes were looked for from {diagnosis.climbs} of {planned} starts only"
        found.append(Finding("Fair", reason, diagnosis.unlooked))
    return found


def is_heavy_tailed(diagnosis: Diagnosis) -> bool:
    """Whether weights cannot tell what the target has beyond the draws of q."""
    return diagnosis.importance.khat >= LARGEST_KHAT or diagnosis.outside > GOOD_OUTSIDE


def is_usable(status: Status) -> Any:
    """Whether a fit that ended so gives something to use; one a run, in a batch."""
    usable = (status == Status.ok) | (status == Status.interrupted)
    return usable | (status == Status.refused_steps) | (status == Status.out_of_budget)


def _of_status(status: Status) -> list[Finding]:
    fine = (status == Status.ok) | (status == Status.out_of_budget)  # `gap_bound` tells the latter
    if bool(jnp.all(fine)):
        return []
    sentence = describe(status).rstrip(".")
    grade = "Fair" if bool(jnp.all(is_usable(status))) else "Bad"
    return [Finding(grade, f"the fit did not end well, {sentence}")]


def _of_values(seen: Importance) -> list[Finding]:
    look = "look at the log density there: it must be a number, or -inf outside its support"
    if not math.isfinite(seen.elbo):
        return [Finding("Bad", "the target is not finite at draws from q", look)]
    found = []
    if seen.undefined:
        grade = "Bad" if seen.undefined > LARGEST_SHARE_UNDEFINED * seen.draws else "Fair"
        reason = f"the target is nan or +inf at {seen.undefined} of {seen.draws} draws"
        found.append(Finding(grade, reason, look))
    outside = seen.excluded - seen.undefined
    if outside:
        grade = "Bad" if seen.excluded > LARGEST_SHARE_EXCLUDED * seen.draws else "Fair"
        reason = f"{outside} of {seen.draws} draws are outside the support of the target"
        found.append(Finding(grade, reason, "say where parameters live (`support=`)"))
    return found


def _of_modes(diagnosis: Diagnosis) -> list[Finding]:
    here = diagnosis.importance.resolution
    rounded = [mode for mode in diagnosis.modes if mode.is_rounded(here)]
    told = [mode for mode in diagnosis.modes if not mode.is_rounded(here)]
    return [_of_rounding(mode) for mode in rounded[:1]] + _of_regions(told)


def _of_rounding(mode: Mode) -> Finding:
    away, nats = _distance(mode), f"{mode.resolution:.2g} nats"
    reason = f"log p may be larger {away} sd away, but is rounded to {nats} there"
    return Finding("Fair", reason, "compute in float64, or mend the log density there")


def _of_regions(modes: list[Mode]) -> list[Finding]:
    if not modes:
        return []
    mode = max(modes, key=lambda m: math.inf if math.isnan(m.log_mass) else m.log_mass)
    if not mode.log_mass <= math.log(LARGEST_MODE):
        held = mode.share
        known = f"about {100 * held:.0f} % of the mass"
        return [_of_region(mode, "Bad", "mass that cannot be told" if math.isnan(held) else known)]
    mode = max(modes, key=lambda m: m.spread)
    grade = _grade(mode.spread, GOOD_SPREAD, LARGEST_SPREAD)
    if grade == "Good":
        return []
    effect = f"an sd is up to {math.exp(mode.spread):.1f} times that of q"
    return [
        _of_region(mode, grade, f"about {100 * mode.share:.1g} % of the mass, so that {effect}")
    ]


def _of_region(mode: Mode, grade: str, mass: str) -> Finding:
    if mode.distance < AROUND:
        return Finding(grade, f"a wider region around q holds {mass}", MIXTURE)
    advice = "try `iblr.GaussianMixture` (of more components, if it is one) or several starts"
    return Finding(grade, f"another region, {_distance(mode)} sd away, holds {mass}", advice)


def _distance(mode: Mode) -> str:
    return f"{mode.distance:.1f}" if mode.distance < 1e4 else f"{mode.distance:.1e}"


def _of_weights(seen: Importance, near: bool, light: bool, looked: bool) -> list[Finding]:
    """What k-hat says of a q that is near or not; its tails are light or not, looked at or not."""
    if math.isnan(seen.khat):
        return [Finding("Bad", "the tail of the importance weights cannot be told", MIXTURE)]
    if seen.khat >= LARGEST_KHAT:
        advice = f"`iblr.diagnose(..., draws={10 * seen.draws})` tells more surely"
        if seen.khat < LARGEST_KHAT + seen.khat_se and near and light:
            return [Finding("Fair", "the weights may have too heavy a tail", advice)]
        has_mean = seen.khat <= NO_MEAN
        needed = NEARLY_ALL if has_mean else MOST if looked else ALL_BUT_FEW
        if near and (light or has_mean) and seen.ess >= needed * seen.draws:
            reason = "the target has heavier tails than q, though little mass is seen there"
            return [Finding("Fair", reason, advice)]
        return [Finding("Bad", "do not use the variances", MIXTURE)]
    if seen.khat > GOOD_KHAT and not (near and light and seen.ess >= ALL_BUT_FEW * seen.draws):
        return [Finding("Fair", "the weights have a heavy tail", CORRECTED)]
    return []


def _of_tails(outside: float) -> list[Finding]:
    """Nothing where they were not looked at."""
    grade = "Good" if math.isnan(outside) else _grade(outside, GOOD_OUTSIDE, LARGEST_OUTSIDE)
    share = f"{100 * min(outside, 1.0):.2g} % of its mass where q has 0.01 %"
    reason = f"the target has heavier tails than q, some {share}"
    if grade == "Bad":
        return [Finding("Bad", f"do not use the variances: {reason}", MIXTURE)]
    if grade == "Fair":
        return [Finding("Fair", reason, "NUTS from here tells more (`posterior.to_nuts()`)")]
    return []


def _of_moves(diagnosis: Diagnosis) -> list[Finding]:
    shift, spread, shape = diagnosis.shift, diagnosis.spread, diagnosis.shape
    sd = 100 * math.expm1(min(spread, 10.0))
    grades = (
        (_grade(shift, GOOD_SHIFT, LARGEST_SHIFT), f"a mean is off by at least {shift:.2f} sd"),
        (_grade(spread, GOOD_SPREAD, LARGEST_SPREAD), f"an sd is off by at least {sd:.0f} %"),
        (_grade(shape, GOOD_SHAPE, 1.0), f"a marginal probability is off by at least {shape:.2f}"),
    )
    advice = CORRECTED if diagnosis.importance.usable else MIXTURE
    return [Finding(grade, reason, advice) for grade, reason in grades if grade != "Good"]


def _of_kl(seen: Importance, dim: int) -> list[Finding]:
    expected = seen.draws * math.exp(-2 * seen.kl)
    low, high = MANY_SMALL_TERMS
    dim = dim if low * expected <= seen.ess <= high * expected else 1
    good, largest = max(GOOD_KL, GOOD_KL_EACH * dim), max(LARGEST_KL, LARGEST_KL_EACH * dim)
    grade = _grade(seen.kl, good, largest)
    if grade == "Good":
        return []
    if grade == "Bad":
        return [Finding("Bad", "q is far from the target", MIXTURE)]
    advice = CORRECTED if seen.usable else MIXTURE
    return [Finding("Fair", "q is not very near to the target", advice)]


def _grade(value: float, good: float, largest: float) -> str:
    """Of a number that should be small; what is not a number is Bad."""
    return "Good" if value <= good else "Fair" if value <= largest else "Bad"


def _numbers(diagnosis: Diagnosis) -> str:
    seen = diagnosis.importance
    khat = "constant weights" if seen.khat == -math.inf else f"k-hat {seen.khat:.2f}"
    return f"{khat}, KL {seen.kl:.2g} ± {seen.kl_se:.1g} nats, ESS {seen.ess:.0f} of {seen.draws}"


def _starts(diagnosis: Diagnosis) -> str:
    return f"{diagnosis.climbs} dispersed start" + ("s" if diagnosis.climbs != 1 else "")
