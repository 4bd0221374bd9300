/* Three processes connect by epid alone, and one is killed. The error handlers of the other two
   must be called within 20 seconds, even in a process that is never idle. With network namespaces,
   the processes alternate between them and count as different hosts.

     killed ROUNDS [NAMESPACE NAMESPACE] */
#define _GNU_SOURCE
#include <fcntl.h>
#include <psm2.h>
#include <psm2_mq.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS 3

static int heard;

static double now (void)
{
  struct timespec t;
  clock_gettime (CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static psm2_error_t handler (psm2_ep_t ep, const psm2_error_t error, const char *text,
                             psm2_error_token_t token)
{
  (void) ep, (void) token;
  heard += error == PSM2_EP_NO_NETWORK && strstr (text, "has failed") != NULL;
  return error;
}

static void must (int holds, const char *what)
{
  if (!holds)
    {
      fprintf (stderr, "process %d: %s\n", getpid (), what);
      _exit (2);
    }
}

/* One process: writes its epid, reads all epids, connects, receives from all, reports. */
static int process (int rank, int in, int out, const char *space)
{
  int major = 2, minor = 2;
  psm2_uuid_t key = { 9 };
  struct psm2_ep_open_opts opts;
  psm2_ep_t ep;
  psm2_mq_t mq;
  psm2_epid_t ids[RANKS];
  psm2_error_t errors[RANKS];
  psm2_epaddr_t peers[RANKS];
  psm2_mq_tag_t tag = { { 1, 0, 0, 0 } }, all = { { -1u, -1u, -1u, 0 } };
  psm2_mq_req_t reqs[RANKS], never, req;
  psm2_mq_status2_t status;
  double end;
  if (space != NULL)
    {
      char path[99];
      snprintf (path, sizeof path, "/run/netns/%s", space);
      must (setns (open (path, O_RDONLY), CLONE_NEWNET) == 0, "no such namespace");
    }
  psm2_error_register_handler (NULL, handler);
  must (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK,
        "init");
  must (psm2_ep_open (key, &opts, &ep, &ids[rank]) == PSM2_OK, "open");
  must (psm2_mq_init (ep, 0, NULL, 0, &mq) == PSM2_OK, "queue");
  must (write (out, &ids[rank], 8) == 8 && read (in, ids, sizeof ids) == sizeof ids, "ids");
  /* Rank 0 connects first, while the other ranks make no calls. Their threads still answer. */
  if (rank != 0)
    usleep (30000);
  must (psm2_ep_connect (ep, RANKS, ids, NULL, errors, peers, 20000000000) == PSM2_OK, "connect");
  for (int peer = 0; peer < RANKS; peer++)
    must (psm2_mq_irecv2 (mq, peers[peer], &tag, &all, 0, &ids[peer], 8, NULL, &reqs[peer])
              == PSM2_OK,
          "receive");
  for (int peer = 0; peer < RANKS; peer++)
    must (psm2_mq_send2 (mq, peers[peer], 0, &tag, &rank, 4) == PSM2_OK, "send");
  for (int peer = 0; peer < RANKS; peer++)
    must (psm2_mq_wait2 (&reqs[peer], &status) == PSM2_OK && status.error_code == PSM2_OK, "wait");
  must (write (out, "r", 1) == 1, "ready");
  must (read (in, &end, 8) == 8, "go");
  if (rank == RANKS - 1)
    pause ();
  /* May fail, because the answering thread may have detected the death already. */
  psm2_error_t posted = psm2_mq_irecv2 (mq, peers[RANKS - 1], &tag, &all, 0, ids, 8, NULL, &never);
  must (posted == PSM2_OK || posted == PSM2_INTERNAL_ERR, "second receive");
  /* Rank 0 is never idle: it always finds a completed request that it does not free. */
  psm2_mq_tag_t own = { { 2, 0, 0, 0 } };
  if (rank == 0)
    must (psm2_mq_irecv2 (mq, peers[0], &own, &all, 0, ids, 4, NULL, &reqs[0]) == PSM2_OK
              && psm2_mq_send2 (mq, peers[0], 0, &own, &rank, 4) == PSM2_OK,
          "send to oneself");
  double begun = now ();
  while (heard == 0 && now () < begun + 20)
    must (psm2_mq_ipeek2 (mq, &req, &status) != PSM2_PARAM_ERR, "peek");
  double took = now () - end;
  must (heard == 1, "was not told of the killed peer, or twice");
  must (
      posted != PSM2_OK
          || (psm2_mq_wait2 (&never, &status) == PSM2_OK && status.error_code == PSM2_INTERNAL_ERR),
      "a receive from the killed peer ended otherwise");
  must (rank != 0 || psm2_mq_wait2 (&reqs[0], &status) == PSM2_OK, "take");
  must (write (out, &took, 8) == 8, "report");
  must (read (in, ids, 1) == 1, "leave");
  must (psm2_mq_finalize (mq) == PSM2_OK
            && psm2_ep_close (ep, PSM2_EP_CLOSE_GRACEFUL, 5000000000) == PSM2_OK,
        "close");
  return psm2_finalize ();
}

int main (int argc, char **argv)
{
  int rounds = argc > 1 ? atoi (argv[1]) : 1;
  double longest = 0;
  for (int round = 0; round < rounds; round++)
    {
      int to[RANKS][2], from[RANKS][2];
      pid_t pids[RANKS];
      psm2_epid_t ids[RANKS];
      for (int rank = 0; rank < RANKS; rank++)
        {
          if (pipe (to[rank]) != 0 || pipe (from[rank]) != 0)
            return perror ("pipe"), 1;
          if ((pids[rank] = fork ()) == 0)
            _exit (
                process (rank, to[rank][0], from[rank][1], argc > 3 ? argv[2 + rank % 2] : NULL));
        }
      int good = 1;
      char ready;
      for (int rank = 0; rank < RANKS; rank++)
        good &= close (from[rank][1]) == 0 && read (from[rank][0], &ids[rank], 8) == 8;
      for (int rank = 0; good && rank < RANKS; rank++)
        good &= write (to[rank][1], ids, sizeof ids) == sizeof ids;
      for (int rank = 0; good && rank < RANKS; rank++)
        good &= read (from[rank][0], &ready, 1) == 1;
      kill (pids[RANKS - 1], SIGKILL);
      double end = now (), took;
      for (int rank = 0; good && rank < RANKS; rank++)
        good &= write (to[rank][1], &end, 8) == 8;
      for (int rank = 0; good && rank < RANKS - 1; rank++)
        {
          good &= read (from[rank][0], &took, 8) == 8;
          if (took > longest)
            longest = took;
        }
      for (int rank = 0; rank < RANKS - 1; rank++)
        good &= write (to[rank][1], "l", 1) == 1;
      for (int rank = 0; rank < RANKS; rank++)
        {
          int status;
          waitpid (pids[rank], &status, 0);
          if (rank != RANKS - 1)
            good &= WIFEXITED (status) && WEXITSTATUS (status) == 0;
          close (to[rank][0]), close (to[rank][1]), close (from[rank][0]);
        }
      if (!good)
        return printf ("round %d failed\n", round), 1;
    }
  printf ("%d killed, the others told after at most %.3f s\n", rounds, longest);
  return 0;
}
