# SPDX-License-Identifier: Apache-2.0
"""Four simulated devices, strict shapes, and how many examples hypothesis draws."""

import os

import jax
import pytest
from hypothesis import HealthCheck, settings

# Before the first use of JAX: some tests spread work over devices.
jax.config.update("jax_num_cpu_devices", 4)

settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), max_examples=200)
usual = "ci" if os.environ.get("CI") else "default"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))


@pytest.fixture(autouse=True)
def strict_shapes():
    """A ``[d]`` that silently broadcasts against an ``[n, d]`` is an error."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """Hundreds of programs would otherwise stay in memory until the end."""
    yield
    jax.clear_caches()
