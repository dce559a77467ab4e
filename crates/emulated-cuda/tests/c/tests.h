// Every test by name; `main.c` runs one of them.
#ifndef TESTS_H
#define TESTS_H

#define TESTS(X)                                                                                                       \
    X(devices) X(contexts) X(memory) X(host_memory) X(streams) X(missing_synchronize) X(capture) X(entry_points)       \
    X(fork) X(wrong_variable) X(no_device)                                                                             \
    X(round_trip) X(wrong_order) X(arguments) X(remap) X(out_of_memory) X(host_checkpoint) X(suspended) X(lock_waits)  \
    X(lock_timeout) X(stopped_target) X(killed_savers) X(killed_after_begin) X(released_context) X(old_driver)         \
    X(older_driver) X(faults) X(traced) X(resident)

#define DECLARE(name) void test_##name(void);
TESTS(DECLARE)
#undef DECLARE

#endif
