/* A ring, all-to-all exchanges of 1 byte to 2 MiB per pair, and messages received in reverse order.
   All data is checked.

     mpi REVERSED [FILE]

   REVERSED messages are sent before the first one is received. With FILE, repeats exchanges until
   FILE.end exists, and for a while after that. Creates FILE before the exchanges, and FILE.more
   after FILE.end. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

static void must (int holds, const char *what)
{
  if (!holds)
    {
      puts (what);
      MPI_Abort (MPI_COMM_WORLD, 1);
    }
}

static char byte (int rank, size_t at)
{
  return (char) (rank * 31 + at * 7 + (at >> 9));
}

static void ring (int rank, int size)
{
  long value = rank, next;
  for (int turn = 0; turn < size * 300; turn++)
    {
      MPI_Sendrecv (&value, 1, MPI_LONG, (rank + 1) % size, 1, &next, 1, MPI_LONG,
                    (rank + size - 1) % size, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      value = next;
    }
  must (value == rank, "the ring brought another value back");
}

static void all_to_all (int rank, int size, size_t most)
{
  for (size_t len = 1; len <= most; len *= 8)
    {
      char *out = malloc (len * size), *in = malloc (len * size);
      for (size_t at = 0; at < len * size; at++)
        out[at] = byte (rank, at);
      MPI_Alltoall (out, len, MPI_CHAR, in, len, MPI_CHAR, MPI_COMM_WORLD);
      for (int peer = 0; peer < size; peer++)
        for (size_t at = 0; at < len; at++)
          must (in[peer * len + at] == byte (peer, rank * len + at),
                "all to all brought other bytes");
      free (out);
      free (in);
    }
}

/* Blocking sends that must complete before a receive is posted. Each tag is used twice. */
static void reverse (int rank, int count)
{
  int value;
  double begin = MPI_Wtime ();
  for (int at = 0; rank == 0 && at < count; at++)
    MPI_Send (&at, 1, MPI_INT, 1, at / 2, MPI_COMM_WORLD);
  MPI_Status status;
  for (int at = count - 1; rank == 1 && at >= 0; at--)
    {
      /* Messages of one tag arrive in send order. */
      int oldest = (at ^ 1) < count ? at ^ 1 : at;
      MPI_Recv (&value, 1, MPI_INT, 0, at / 2, MPI_COMM_WORLD, &status);
      must (value == oldest, "a message in reverse is another");
    }
  struct rusage used;
  getrusage (RUSAGE_SELF, &used);
  if (rank < 2 && count > 0)
    printf ("%s %d in reverse: %.1f s, %ld MiB at most\n", rank ? "received" : "sent", count,
            MPI_Wtime () - begin, used.ru_maxrss / 1024);
}

static void note (int rank, const char *file, const char *suffix)
{
  char name[4096];
  snprintf (name, sizeof name, "%s%s", file, suffix);
  FILE *note = rank == 0 ? fopen (name, "w") : NULL;
  if (note)
    fclose (note);
}

/* Runs while the test takes a link down. */
static void exchange (int rank, int size, const char *file)
{
  char end[4096];
  snprintf (end, sizeof end, "%s.end", file);
  for (int more = 0, rounds = 0; more < 50; rounds++)
    {
      int ended = rank == 0 && access (end, F_OK) == 0;
      all_to_all (rank, size, 1 << 18);
      MPI_Bcast (&ended, 1, MPI_INT, 0, MPI_COMM_WORLD);
      more += ended;
      if (rounds == 10)
        note (rank, file, "");
      if (more == 1)
        note (rank, file, ".more");
    }
}

int main (int argc, char **argv)
{
  int rank, size;
  MPI_Init (&argc, &argv);
  MPI_Comm_rank (MPI_COMM_WORLD, &rank);
  MPI_Comm_size (MPI_COMM_WORLD, &size);
  ring (rank, size);
  all_to_all (rank, size, 8 << 20);
  if (argc > 2)
    exchange (rank, size, argv[2]);
  reverse (rank, argc > 1 ? atoi (argv[1]) : 0);
  MPI_Barrier (MPI_COMM_WORLD);
  printf ("rank %d of %d is done\n", rank, size);
  MPI_Finalize ();
  return 0;
}
