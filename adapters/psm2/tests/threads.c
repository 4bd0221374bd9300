/* Two ranks with MPI_THREAD_MULTIPLE. The threads of each rank send and receive concurrently, and
   check their short and long messages. */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, ROUNDS = 500, LONGEST = 50000 };

static int rank, size;

static void must (int holds, const char *what)
{
  if (!holds)
    {
      puts (what);
      MPI_Abort (MPI_COMM_WORLD, 1);
    }
}

static void *run (void *number)
{
  int tag = (int) (long) number, from = (rank + size - 1) % size;
  char *out = malloc (LONGEST), *in = malloc (LONGEST);
  for (int round = 0; round < ROUNDS; round++)
    {
      int len = round % 10 == 0 ? LONGEST : round;
      MPI_Request requests[2];
      MPI_Status status;
      memset (out, rank * 50 + tag * 10 + round, len);
      if (round % 2)
        {
          MPI_Isend (out, len, MPI_CHAR, (rank + 1) % size, tag, MPI_COMM_WORLD, &requests[0]);
          MPI_Irecv (in, LONGEST, MPI_CHAR, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &requests[1]);
          MPI_Waitall (2, requests, MPI_STATUSES_IGNORE);
        }
      else
        {
          int got = -1;
          MPI_Isend (out, len, MPI_CHAR, (rank + 1) % size, tag, MPI_COMM_WORLD, &requests[0]);
          MPI_Probe (from, tag, MPI_COMM_WORLD, &status);
          MPI_Get_count (&status, MPI_CHAR, &got);
          must (got == len, "a thread found a message of another length");
          MPI_Recv (in, LONGEST, MPI_CHAR, from, tag, MPI_COMM_WORLD, &status);
          MPI_Wait (&requests[0], MPI_STATUS_IGNORE);
        }
      for (int at = 0; at < len; at++)
        must (in[at] == (char) (from * 50 + tag * 10 + round), "a thread got another message");
    }
  free (out);
  free (in);
  return NULL;
}

int main (int argc, char **argv)
{
  int provided;
  pthread_t threads[THREADS];
  MPI_Init_thread (&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank (MPI_COMM_WORLD, &rank);
  MPI_Comm_size (MPI_COMM_WORLD, &size);
  must (provided == MPI_THREAD_MULTIPLE, "MPI_THREAD_MULTIPLE is not provided");
  for (long at = 0; at < THREADS; at++)
    must (pthread_create (&threads[at], NULL, run, (void *) at) == 0, "no thread");
  for (int at = 0; at < THREADS; at++)
    pthread_join (threads[at], NULL);
  MPI_Barrier (MPI_COMM_WORLD);
  printf ("rank %d of %d is done\n", rank, size);
  MPI_Finalize ();
  return 0;
}
