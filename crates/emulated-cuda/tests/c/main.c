// driver_test NAME: runs one test. driver_test target: serves as a target process.
#include "harness.h"
#include "tests.h"

#include <string.h>

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    if (strcmp(argv[1], "target") == 0)
        return target_main();
#define RUN(name)                                                                                                      \
    if (strcmp(argv[1], #name) == 0) {                                                                                 \
        test_##name();                                                                                                 \
        return 0;                                                                                                      \
    }
    TESTS(RUN)
    fprintf(stderr, "no test is named %s\n", argv[1]);
    return 2;
}
