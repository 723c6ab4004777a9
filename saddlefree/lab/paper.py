"""The paper's own numbers: its results (Appendix B.1), to be shown beside ours, and its hyperparameters (A.3)."""

from typing import Any, NamedTuple


class Loss(NamedTuple):
    """A median over 50 seeds with its bootstrap error."""

    median: float
    error: float


class Losses(NamedTuple):
    """A row of the table, in its order."""

    train: Loss
    test: Loss
    val: Loss


LABELS = {
    "series": "Ours",
    "series-adaptive": "Ours (Adaptive)",
    "sgd": "SGD",
    "adam": "Adam",
    "kfac-fixed": "KFAC (Kazuki)",
    "kfac": "KFAC (DeepMind)",
    "exact": "Exact SFN",
    "exact-adaptive": "Exact SFN (Adaptive)",
    "lbfgs": "LBFGS",
}
"""What the paper calls each optimiser."""

_TABLE = """
uci-energy     series           0.006459   0.005     0.007087  0.0066    0.0104    0.0083
uci-energy     series-adaptive  0.001029   4e-05     0.001678  9.5e-05   0.002165  0.00012
uci-energy     sgd              0.001947   0.0002    0.002361  0.00025   0.003191  0.00038
uci-energy     adam             0.000657   4e-05     0.00113   8.9e-05   0.001571  0.00011
uci-energy     kfac-fixed       0.5018     0.00056   881.8     6.2e+02   904.1     8.1e+02
uci-energy     kfac             0.000714   0.00012   0.006663  0.0024    0.008849  0.0031
uci-energy     exact            0.0005019  2.4e-05   0.0015    9.2e-05   0.001994  9.7e-05
uci-energy     exact-adaptive   0.0004941  1.4e-05   0.001045  3.7e-05   0.001407  3.4e-05
uci-energy     lbfgs            0.002619   0.00051   0.002929  0.00081   0.004161  0.00069
fashion-mnist  series           0.237      0.0061    0.3691    0.00081   0.3423    0.00065
fashion-mnist  series-adaptive  0.233      0.0054    0.3684    0.0009    0.3429    0.0011
fashion-mnist  sgd              0.2762     0.0024    0.3693    0.00062   0.3436    0.00053
fashion-mnist  adam             0.2425     0.0054    0.3582    0.00086   0.3312    0.00036
fashion-mnist  kfac-fixed       0.2375     0.0019    0.3566    0.0006    0.3328    0.00078
fashion-mnist  kfac             0.09567    0.0027    0.4423    0.0023    0.4222    0.0022
svhn           series           0.1573     0.0049    0.583     0.0033    0.5205    0.0021
svhn           series-adaptive  0.4757     0.014     0.6901    0.0041    0.6335    0.0036
svhn           sgd              0.1979     0.0036    0.5113    0.0024    0.4503    0.0024
svhn           adam             0.2082     0.0042    0.5029    0.0045    0.4514    0.004
svhn           kfac-fixed       0.09535    0.006     0.7036    0.0047    0.6288    0.0048
svhn           kfac             0.007294   0.00078   0.6854    0.0026    0.6288    0.0035
cifar-10       series           1.275      0.009     1.497     0.00098   1.504     0.0019
cifar-10       series-adaptive  0.7614     0.02      1.595     0.0084    1.596     0.0076
cifar-10       sgd              0.9871     0.0027    1.597     0.017     1.617     0.014
cifar-10       adam             0.01125    0.0012    3.803     0.0091    3.761     0.012
cifar-10       kfac-fixed       0.03947    0.0011    3.29      0.0075    3.226     0.013
cifar-10       kfac             0.01466    0.0012    1.727     0.019     1.683     0.019
"""


def _read(line: str) -> tuple[tuple[str, str], Losses]:
    problem, optimiser, *numbers = line.split()
    train, train_error, test, test_error, val, val_error = map(float, numbers)
    return (problem, optimiser), Losses(Loss(train, train_error), Loss(test, test_error), Loss(val, val_error))


RESULTS = dict(map(_read, _TABLE.strip().splitlines()))
"""(problem, optimiser) to the paper's row."""

_TUNED = """
uci-energy     series           learning_rate=1.787 momentum=0.717 damping=0.0244334238 terms=18 order=8
uci-energy     series-adaptive  initial_damping=1.46417969e-06 terms=9 order=4
uci-energy     exact            learning_rate=0.0049 momentum=0.0638 damping=0.0 threshold=0.00052 replacement=0.649351
uci-energy     exact-adaptive   initial_damping=0.0125 average=0.95
uci-energy     sgd              learning_rate=0.0945226911
uci-energy     adam             learning_rate=0.0173920852 decay=none epsilon=2.72693206e-10 one_minus_beta1=0.254942552 one_minus_beta2=0.0156352886
uci-energy     lbfgs            iterations=20 evaluations=25
uci-energy     kfac             initial_damping=6.97125495e-05
uci-energy     kfac-fixed       learning_rate=0.0908813574 momentum=0.26447181 damping=5.63013694e-06
fashion-mnist  series           batch_size=400 learning_rate=0.305 momentum=0.428 damping=0.0577 terms=13 order=5
fashion-mnist  series-adaptive  batch_size=800 initial_damping=0.09330085595 terms=14 order=2
fashion-mnist  sgd              batch_size=50 learning_rate=0.01877169559
fashion-mnist  adam             batch_size=200 learning_rate=0.000655385518 decay=none epsilon=5.99064249e-05 one_minus_beta1=0.474986861 one_minus_beta2=0.01949103971
fashion-mnist  kfac             batch_size=3200 initial_damping=0.527373565
fashion-mnist  kfac-fixed       batch_size=800 learning_rate=0.08678173597 momentum=0.405766089 damping=0.2197808501
svhn           series           batch_size=200 learning_rate=0.108 momentum=0.327 damping=0.000187 terms=1 order=0
svhn           series-adaptive  batch_size=100 initial_damping=4.13832792e-07 terms=5 order=2
svhn           sgd              batch_size=50 learning_rate=0.0133199974
svhn           adam             batch_size=1600 learning_rate=0.001836152161 decay=none epsilon=3.35486047e-06 one_minus_beta1=0.1262533228 one_minus_beta2=0.02532913797
svhn           kfac             batch_size=1600 initial_damping=0.576047619
svhn           kfac-fixed       batch_size=800 learning_rate=0.00882824525 momentum=0.222133467 damping=0.000379341022
cifar-10       series           batch_size=3200 learning_rate=0.562 momentum=0.115 damping=0.00244 terms=2 order=0
cifar-10       series-adaptive  batch_size=3200 initial_damping=0.000103660718 terms=5 order=2
cifar-10       sgd              batch_size=3200 learning_rate=0.00411401629
cifar-10       adam             batch_size=800 learning_rate=7.70367561e-05 decay=none epsilon=0.0003613837512 one_minus_beta1=0.002655117842 one_minus_beta2=0.000100250761
cifar-10       kfac             batch_size=800 initial_damping=0.216592763
cifar-10       kfac-fixed       batch_size=3200 learning_rate=0.0228984138 momentum=0.00670495446 damping=0.00221384786
"""  # noqa: E501 (one row, one line)


def _setting(text: str) -> tuple[str, Any]:
    name, value = text.split("=")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value


TUNED = {
    (line.split()[0], line.split()[1]): dict(map(_setting, line.split()[2:])) for line in _TUNED.strip().splitlines()
}
"""(problem, optimiser) to its hyperparameters. Adam's rate does not decay there. Exact SFN's replacement is an
eigenvalue: the paper's constant is in its code the inverse of the one that is put in place."""
