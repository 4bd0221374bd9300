/* Peers are killed while they are being connected. Each connect returns as soon as the peer is
   connected or known to be dead. If no process ever answered for an epid, the connect waits until
   the deadline, because the peer may not have started.

     vanish ROUNDS */
#include <psm2.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static psm2_uuid_t key = { 11 };
static pid_t child;
static unsigned delay;

static psm2_ep_t endpoint (psm2_epid_t *id)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  struct psm2_ep_open_opts opts;
  psm2_ep_t ep;
  if (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) != PSM2_OK
      || psm2_init (&major, &minor) != PSM2_OK || psm2_ep_open_opts_get_defaults (&opts) != PSM2_OK
      || psm2_ep_open (key, &opts, &ep, id) != PSM2_OK)
    exit (2);
  return ep;
}

static void *killer (void *none)
{
  usleep (delay);
  kill (child, SIGKILL);
  return none;
}

int main (int argc, char **argv)
{
  int rounds = argc > 1 ? atoi (argv[1]) : 1, reached = 0, gone = 0, never = 0;
  unsigned seed = time (NULL);
  printf ("seed %u\n", seed);
  fflush (stdout);
  for (int round = 0; round < rounds; round++)
    {
      int pipes[2], result;
      psm2_epid_t theirs = 0, ours;
      if (pipe (pipes) != 0)
        return 2;
      if ((child = fork ()) == 0)
        {
          endpoint (&theirs);
          if (write (pipes[1], &theirs, 8) == 8)
            pause ();
          _exit (2);
        }
      /* Each connect needs a process with its own endpoint, because fork copies no threads. */
      pid_t asker = fork ();
      if (asker == 0)
        {
          psm2_error_t error;
          psm2_epaddr_t peer;
          pthread_t thread;
          psm2_ep_t ep = endpoint (&ours);
          srand (seed + round);
          delay = rand () % 4000;
          if (read (pipes[0], &theirs, 8) != 8 || pthread_create (&thread, NULL, killer, NULL) != 0)
            _exit (2);
          error = psm2_ep_connect (ep, 1, &theirs, NULL, &error, &peer, 1000000000);
          _exit (error == PSM2_OK                   ? 10
                 : error == PSM2_EPID_NETWORK_ERROR ? 11
                 : error == PSM2_EPID_UNREACHABLE   ? 12
                                                    : 1);
        }
      waitpid (asker, &result, 0);
      kill (child, SIGKILL);
      waitpid (child, NULL, 0);
      close (pipes[0]);
      close (pipes[1]);
      result = WIFEXITED (result) ? WEXITSTATUS (result) : 99;
      reached += result == 10, gone += result == 11, never += result == 12;
      if (result < 10 || result > 12)
        return printf ("round %d: the connect ended with %d\n", round, result), 1;
    }
  printf ("%d reached, %d gone meanwhile, %d never heard of\n", reached, gone, never);
  return 0;
}
