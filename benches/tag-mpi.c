/* Measures 8-byte messages between two ranks: ping-pong latency (ns, median of batches) and rate
 * (M/s) with windows of 64 posted receives, as in tag-bw. compare-tag.sh prints the results next
 * to ours. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCHES = 101, PER_BATCH = 2000, WINDOW = 64, WINDOWS = 20000 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int me;
    long word = 7, words[WINDOW];
    double ns[BATCHES];
    MPI_Request requests[WINDOW];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    int other = 1 - me;
    for (int batch = 0; batch < BATCHES; batch++) {
        double begun = MPI_Wtime();
        for (int k = 0; k < PER_BATCH; k++) {
            if (me == 0) {
                MPI_Send(&word, 8, MPI_BYTE, other, 1, MPI_COMM_WORLD);
                MPI_Recv(&word, 8, MPI_BYTE, other, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            } else {
                MPI_Recv(&word, 8, MPI_BYTE, other, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Send(&word, 8, MPI_BYTE, other, 1, MPI_COMM_WORLD);
            }
        }
        ns[batch] = (MPI_Wtime() - begun) * 1e9 / PER_BATCH / 2;
    }
    qsort(ns, BATCHES, sizeof *ns, ascending);
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    for (int window = 0; window < WINDOWS; window++) {
        for (int k = 0; k < WINDOW; k++) {
            if (me == 0)
                MPI_Isend(&word, 8, MPI_BYTE, other, 2, MPI_COMM_WORLD, &requests[k]);
            else
                MPI_Irecv(&words[k], 8, MPI_BYTE, other, 2, MPI_COMM_WORLD, &requests[k]);
        }
        MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - begun;
    if (me == 0)
        printf("%.1f %.3f\n", ns[BATCHES / 2], (double)WINDOW * WINDOWS / seconds * 1e-6);
    MPI_Finalize();
    return 0;
}
