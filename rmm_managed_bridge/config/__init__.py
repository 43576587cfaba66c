"""The arguments of `install`, from a call or from the environment, checked."""

from rmm_managed_bridge.config.arguments import BridgeConfig, Hints, PoolSettings, read_config

__all__ = ["BridgeConfig", "Hints", "PoolSettings", "read_config"]
