// Tag matching in an MPI library: the workloads of `fishplate perf match` that MPI can express, in
// one process that sends to itself. Prints one row per workload and depth, with the same fields.
// compare-match.sh builds and runs it.
//
// usage: match-mpi ENGINE UNITS DEPTH...
//
// All messages have the same source, so P2 and P5 differ from P1 only by MPI_ANY_SOURCE. All
// receives are posted before their messages are sent, because MPICH does not complete a send to
// oneself before its receive is posted.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LIVE_TAG = 1 << 20, BLOCK = 64 };

static MPI_Request *receives;
static uint64_t *bytes;

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void post(int any_source, int tag, int context) {
  MPI_Irecv (&bytes[context], 8, MPI_BYTE, any_source ? MPI_ANY_SOURCE : 0, tag, MPI_COMM_SELF,
             &receives[context]);
}

// Sends a message, and checks that receive `context` gets it.
static void arrive(int tag, int context, uint64_t cookie) {
    MPI_Request send;
    MPI_Isend(&cookie, 8, MPI_BYTE, 0, tag, MPI_COMM_SELF, &send);
    MPI_Wait(&receives[context], MPI_STATUS_IGNORE);
    MPI_Wait(&send, MPI_STATUS_IGNORE);
    if (bytes[context] != cookie) {
      fprintf (stderr, "receive %d got %llu, not %llu\n", context,
               (unsigned long long) bytes[context], (unsigned long long) cookie);
      exit (1);
    }
}

// Runs one round, and returns its number of units. Stores the longest time of one unit in
// `longest`, unless that is null.
static long run_round(const char *work, int depth, double *longest) {
    int any = !strcmp(work, "P5");
    double last = longest ? now_ns() : 0;
#define TICK()                                                                                     \
    do {                                                                                           \
      if (longest) {                                                                               \
        double t = now_ns ();                                                                      \
        if (t - last > *longest) *longest = t - last;                                              \
        last = t;                                                                                  \
      }                                                                                            \
    } while (0)
    if (!strcmp(work, "P1") || !strcmp(work, "P2") || any) {
        for (int n = 0; n < BLOCK; n++) {
            post(any, LIVE_TAG, depth);
            arrive(LIVE_TAG, depth, n);
            TICK();
        }
        return BLOCK;
    }
    int same = !strcmp(work, "P9"), reverse = !strcmp(work, "P7");
    for (int n = 0; n < depth; n++) { post(0, same ? LIVE_TAG : n, n); TICK(); }
    for (int n = 0; n < depth; n++) {
        int at = reverse ? depth - 1 - n : n;
        arrive(same ? LIVE_TAG : at, at, at);
        TICK();
    }
    return depth;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static const char *works[] = {"P1", "P2", "P5", "P6", "P7", "P9"};
    if (argc < 4) return fprintf(stderr, "usage: %s ENGINE UNITS DEPTH...\n", argv[0]), 2;
    MPI_Init(&argc, &argv);
    long units = atol(argv[2]);
    for (unsigned w = 0; w < sizeof works / sizeof *works; w++) {
        const char *work = works[w];
        int drains = strcmp(work, "P1") && strcmp(work, "P2") && strcmp(work, "P5");
        for (int a = 3; a < argc; a++) {
            int depth = atoi(argv[a]);
            if (drains && !depth) continue;
            receives = malloc((depth + 1) * sizeof *receives);
            bytes = malloc((depth + 1) * sizeof *bytes);
            for (int n = 0; !drains && n < depth; n++) post(strcmp(work, "P1") != 0, n, n);
            run_round(work, depth, NULL);
            double times[5], longest = 0;
            for (int turn = 0; turn < 5; turn++) {
                long done = 0;
                double began = now_ns();
                do done += run_round (work, depth, NULL);
                while (done < units && now_ns () - began < 3e8);
                times[turn] = (now_ns() - began) / done;
            }
            run_round(work, depth, &longest);
            qsort(times, 5, sizeof *times, compare);
            printf ("{\"schema_version\":1,\"test\":\"match\",\"engine\":\"%s\",\"workload\":\"%"
                    "s\",\"depth\":%d,\"ns_per_op\":%.3f,"
                    "\"instr_per_op\":null,\"max_ns\":%.1f,\"bytes_per_entry\":null}\n",
                    argv[1], work, depth, times[2], longest);
            fflush(stdout);
            for (int n = 0; !drains && n < depth; n++) {
                MPI_Cancel(&receives[n]);
                MPI_Wait(&receives[n], MPI_STATUS_IGNORE);
            }
            free(receives);
            free(bytes);
        }
    }
    MPI_Finalize();
    return 0;
}
