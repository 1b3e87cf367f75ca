"""What every test shares: hypothesis profiles."""

import os

from hypothesis import HealthCheck, settings

# A machine under load must not turn into a failing test: no deadlines.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
