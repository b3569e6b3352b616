"""The rates that times are predicted with are those that the saved results give."""

import numpy as np
import pytest
import rates

from tilewise.parallel import estimate


def test_the_table_follows_from_the_results():
    assert estimate.rates() == rates.fitted()


def test_the_fit_finds_what_is_there():
    features = np.array([[1.0, 5.0], [2.0, 1.0], [4.0, 4.0]])
    costs, errors = rates.solve(features, features @ [3.0, 0.5])
    assert costs == pytest.approx([3.0, 0.5])
    assert max(errors) < 1e-9
    with pytest.raises(ValueError, match="not positive"):
        rates.solve([[1.0, 5.0], [2.0, 1.0]], [1.0, 10.0])
