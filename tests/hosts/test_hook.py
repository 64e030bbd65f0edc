"""The hook into ms-swift's trainers: put in once however often it is asked for, and taken back exactly."""
from swift.trainers.mixin import SwiftMixin

from swift_speedup.hosts.ms_swift import install, uninstall


def test_install_is_idempotent_and_uninstall_exact():
    original = SwiftMixin._prepare_gradient_checkpointing
    install()
    first = SwiftMixin._prepare_gradient_checkpointing
    install()
    second = SwiftMixin._prepare_gradient_checkpointing
    try:
        assert first is not original and second._swift_speedup_original is original is first._swift_speedup_original
    finally:
        uninstall()
    assert SwiftMixin._prepare_gradient_checkpointing is original
    uninstall()
    assert SwiftMixin._prepare_gradient_checkpointing is original
