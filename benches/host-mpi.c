/* Measures messages of one size between two ranks: half the round trip of a ping-pong in ns, and
 * the bandwidth of windows of 8 sends in MB/s. compare-host.sh prints the results next to ours.
 * usage: host-mpi BYTES MESSAGES */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 8 };

int main(int argc, char **argv) {
    int me, size = atoi(argv[1]), count = atoi(argv[2]);
    MPI_Request requests[WINDOW];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    int other = 1 - me, windows = count / WINDOW + 1;
    char *from = malloc(size), *to = malloc(size);
    memset(from, 1, size);
    memset(to, 1, size);
    double begun = 0;
    for (int k = -count / 10 - 1; k < count; k++) {
        if (k == 0)
            begun = MPI_Wtime();
        if (me == 0)
            MPI_Send(from, size, MPI_BYTE, other, 1, MPI_COMM_WORLD);
        MPI_Recv(to, size, MPI_BYTE, other, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (me == 1)
            MPI_Send(from, size, MPI_BYTE, other, 1, MPI_COMM_WORLD);
    }
    double ns = (MPI_Wtime() - begun) * 1e9 / count / 2;
    MPI_Barrier(MPI_COMM_WORLD);
    begun = MPI_Wtime();
    for (int window = 0; window < windows; window++) {
        for (int k = 0; k < WINDOW; k++) {
            if (me == 0)
                MPI_Isend(from, size, MPI_BYTE, other, 2, MPI_COMM_WORLD, &requests[k]);
            else
                MPI_Irecv(to, size, MPI_BYTE, other, 2, MPI_COMM_WORLD, &requests[k]);
        }
        MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - begun;
    if (me == 0)
        printf("%.1f %.1f\n", ns, (double)windows * WINDOW * size / seconds * 1e-6);
    MPI_Finalize();
    return 0;
}
