/* Each process of an MPI job writes its rank into memory of all processes, and signals. MPI starts
 * the processes and carries their addresses. Build it with mpicc, and start it with mpirun. */
#include <fishplate.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { size_t len; char bytes[FP_ADDRESS_MAX]; } blob; /* an address or a handle */

static void check (int status, const char *what)
{
  if (status < 0) {
    fprintf (stderr, "%s: %s (%s)\n", what, fp_last_error (), fp_strerror (status));
    MPI_Abort (MPI_COMM_WORLD, 1);
  }
}

static void exchange (const blob *ours, blob *all)
{
  MPI_Allgather (ours, sizeof *ours, MPI_BYTE, all, sizeof *ours, MPI_BYTE, MPI_COMM_WORLD);
}

int main (int count, char **arguments)
{
  int rank, size, sum = 0, got;
  static fp_options options; /* zeroed, so the other options are the defaults */
  fp_node *node;
  fp_mem inbox;
  fp_remote to;
  blob ours = { sizeof ours.bytes, "" };
  MPI_Init (&count, &arguments);
  MPI_Comm_rank (MPI_COMM_WORLD, &rank);
  MPI_Comm_size (MPI_COMM_WORLD, &size);
  blob *all = (blob *) malloc ((size_t) size * sizeof *all);
  fp_peer *peers = (fp_peer *) malloc ((size_t) size * sizeof *peers);
  options.struct_size = sizeof options;
  options.flags = FP_LAUNCHER; /* reads this process's number on its host from the environment */
  check (fp_node_open (&options, &node), "open");
  check (fp_node_address (node, ours.bytes, &ours.len), "address");
  exchange (&ours, all);
  for (int at = 0; at < size; at++)
    check (fp_peer_connect (node, all[at].bytes, all[at].len, &peers[at]), "connect");
  check (fp_mem_alloc (node, 8 + (size_t) size * sizeof rank, &inbox), "alloc");
  ours.len = sizeof ours.bytes;
  check (fp_mem_export (node, inbox, ours.bytes, &ours.len), "export");
  exchange (&ours, all);
  uint64_t slot = 8 + rank * sizeof rank; /* behind the signal */
  check (fp_mem_write (node, inbox, slot, &rank, sizeof rank), "write");
  for (int at = 0; at < size; at++) {
    check (fp_mem_import (node, peers[at], all[at].bytes, all[at].len, &to), "import");
    check (fp_put_signal (node, inbox, slot, 4, to, slot, to, 0, FP_SIGNAL_ADD, 1, NULL), "put");
  }
  check (fp_wait_signal (node, inbox, 0, FP_EQ, size, FP_ANY, 10000, NULL), "wait");
  for (int at = 0; at < size; at++, sum += got)
    check (fp_mem_read (node, inbox, 8 + at * sizeof rank, &got, sizeof got), "read");
  printf ("rank %d of %d: the sum is %d\n", rank, size, sum);
  check (fp_quiet (node, FP_ANY, 10000), "quiet");
  check (fp_node_close (node, 10000), "close");
  return MPI_Finalize ();
}
