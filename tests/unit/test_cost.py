"""Rule 9: what does not pay turns itself off, says so, and is tried again."""
from swift_speedup.memo.cost import _LONGEST_PAUSE, _PAUSE, _WINDOW, Cost


def lookups(cost, count, computed, compute, lookup):
    """``count`` lookups of 10 units; seconds are per unit."""
    done = 0
    for _ in range(count):
        if cost.worth_it():
            cost.record(10, computed, compute * computed, lookup * 10)
            done += 1
    return done


def test_dear_lookups_are_turned_off_after_two_judgements_and_tried_again_after_a_pause():
    cost = Cost()
    assert lookups(cost, 3 * _WINDOW, 10, 1e-6, 5e-6) == 2 * _WINDOW
    assert '5.0 us' in cost.reason and '1.0 us' in cost.reason
    assert lookups(cost, _PAUSE - _WINDOW, 10, 1e-6, 5e-6) == 1  # the pause is over
    assert lookups(cost, _WINDOW, 10, 1e-6, 5e-6) == _WINDOW - 1 and cost.reason  # one judgement was enough this time
    for _ in range(20):
        lookups(cost, _LONGEST_PAUSE + _WINDOW, 10, 1e-6, 5e-6)
    assert cost._pause == _LONGEST_PAUSE


def test_a_segment_that_pays_stays_on_and_comes_back():
    cost = Cost()
    assert lookups(cost, 10 * _WINDOW, 10, 5e-6, 1e-6) == 10 * _WINDOW  # first epoch: only misses
    assert lookups(cost, 10 * _WINDOW, 0, 0.0, 1e-6) == 10 * _WINDOW
    lookups(cost, 2 * _WINDOW, 0, 0.0, 9e-6)
    assert cost.reason
    assert lookups(cost, _PAUSE + 3 * _WINDOW, 0, 0.0, 1e-6) > 2 * _WINDOW and cost.reason is None


def test_one_slow_window_is_noise():
    cost = Cost()
    for _ in range(5):
        lookups(cost, _WINDOW, 5, 5e-6, 9e-6)
        lookups(cost, _WINDOW, 5, 5e-6, 1e-7)
    assert cost.reason is None


def test_few_hits_do_not_pay_for_dear_lookups():
    cost = Cost()
    lookups(cost, 3 * _WINDOW, 9, 5e-6, 1e-6)  # a tenth of 5 us is less than 1 us
    assert cost.reason


def test_samples_that_never_come_back_are_given_up_after_the_second_epoch():
    cost = Cost()
    cost.count(100, 0)
    cost.epoch_ended(first=True)
    assert cost.reason is None
    cost.count(100, 1)
    cost.epoch_ended(first=False)
    assert '1 of 100' in cost.reason and not cost.worth_it()


def test_more_about_the_last_lookup_counts_its_work_once():
    cost = Cost()
    for _ in range(2 * _WINDOW):
        cost.record(10, 10, 5e-5, 1e-6)
        cost.record(0, 0, 0.0, 1e-6)
    assert cost.reason is None and abs(cost._seconds - 5e-6) < 1e-9
