/* The MPI program of compare-mpi.sh. Prints "NAME VALUE" lines. Each value is the best of many
 * short batches, because that is least disturbed by other load.
 *
 * Two ranks: half round trips in microseconds (lat.BYTES), messages in M/s (rate.8), bandwidth in
 * MB/s (bw.BYTES). More ranks: the time of an allreduce in microseconds (allreduce.BYTES). An
 * argument limits the bytes of a message. */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCHES = 101, WINDOW = 64, LONGEST = 4 << 20 };

static int me;
static char *mine, *theirs;

/* Returns half a round trip in microseconds. */
static double ping(int bytes, int count) {
    double best = 1e30;
    for (int batch = 0; batch < BATCHES; batch++) {
        double begun = MPI_Wtime();
        for (int k = 0; k < count; k++) {
            if (me == 0) {
                MPI_Send(mine, bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
                MPI_Recv(theirs, bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            } else {
                MPI_Recv(theirs, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Send(mine, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
            }
        }
        best = fmin(best, MPI_Wtime() - begun);
    }
    return best * 1e6 / count / 2;
}

/* Returns messages per second. The receiver answers each window. */
static double stream(int bytes, int window, int count) {
    double best = 1e30;
    MPI_Request requests[WINDOW];
    for (int batch = 0; batch < BATCHES; batch++) {
        double begun = MPI_Wtime();
        for (int k = 0; k < count; k++) {
            for (int i = 0; i < window; i++) {
                if (me == 0)
                    MPI_Isend(mine, bytes, MPI_BYTE, 1, 2, MPI_COMM_WORLD, &requests[i]);
                else
                    MPI_Irecv(theirs, bytes, MPI_BYTE, 0, 2, MPI_COMM_WORLD, &requests[i]);
            }
            MPI_Waitall(window, requests, MPI_STATUSES_IGNORE);
            if (me == 0)
                MPI_Recv(theirs, 0, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            else
                MPI_Send(mine, 0, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
        }
        best = fmin(best, MPI_Wtime() - begun);
    }
    return (double)window * count / best;
}

static double reduce(int bytes, int count) {
    double best = 1e30;
    for (int batch = 0; batch < BATCHES; batch++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        for (int k = 0; k < count; k++)
            MPI_Allreduce(mine, theirs, bytes / 8, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        best = fmin(best, MPI_Wtime() - begun);
    }
    return best * 1e6 / count;
}

int main(int argc, char **argv) {
    int ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int longest = argc > 1 ? atoi(argv[1]) : LONGEST;
    mine = aligned_alloc(4096, LONGEST);
    theirs = aligned_alloc(4096, LONGEST);
    memset(mine, 0, LONGEST);
    memset(theirs, 0, LONGEST);
#define SHOW(name, bytes, value)                          \
    do {                                                  \
        double shown = (value);                           \
        if (me == 0)                                      \
            printf("%s.%d %.4f\n", (name), (bytes), shown); \
    } while (0)
    if (ranks == 2) {
        SHOW("lat", 8, ping(8, 500));
        SHOW("rate", 8, stream(8, WINDOW, 20) * 1e-6);
        for (int bytes = 4096; bytes <= longest; bytes *= 4) {
            int count = LONGEST / bytes;
            count = count > 200 ? 200 : count;
            SHOW("lat", bytes, ping(bytes, count));
            SHOW("bw", bytes, stream(bytes, 16, (count + 15) / 16) * bytes * 1e-6);
        }
    } else {
        SHOW("allreduce", 8, reduce(8, 50));
        if (longest >= 1 << 20)
            SHOW("allreduce", 1 << 20, reduce(1 << 20, 1));
    }
    MPI_Finalize();
    return 0;
}
