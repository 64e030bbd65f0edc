"""For ``swift sft --external_plugins <this file>``: nothing is patched. Options: ``SWIFT_SPEEDUP_*`` in the environment."""
from swift_speedup.config import SpeedupConfig
from swift_speedup.hosts.ms_swift import install

SpeedupConfig.from_env()  # a bad value ends the run now, not after the model has been loaded
install()
