"""The paper's own results, to be shown beside those measured here: the table of its Appendix B.1."""

from typing import NamedTuple


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
