/* A process is late to close, while two others close with a short timeout. First it makes no call
   until the others have closed. Then it receives, after their timeout, messages that they sent
   before they closed. Last, it receives active messages before these messages, so the others must
   still send both kinds while they close. Each close must succeed, and no message may be lost. */
#define _GNU_SOURCE
#include <psm2.h>
#include <psm2_am.h>
#include <psm2_mq.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3
#define LATE 2
#define TIMEOUT_NS 100000000
/* Active messages, more than a peer that makes no calls has room for. */
#define ACTIVE 200

/* Shared by the processes. */
static struct
{
  psm2_epid_t ids[RANKS];
  atomic_int opened, connected, sent, closed;
} *shared;

static int heard, handled;

static int handle (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                   void *context)
{
  (void) token, (void) args, (void) nargs, (void) src, (void) len, (void) context;
  handled++;
  return 0;
}

static psm2_error_t handler (psm2_ep_t ep, const psm2_error_t error, const char *text,
                             psm2_error_token_t token)
{
  (void) ep, (void) token;
  fprintf (stderr, "process %d: %s\n", getpid (), text);
  heard++;
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

static void wait_for (atomic_int *number, int value)
{
  while (atomic_load (number) < value)
    usleep (1000);
}

static void receive (psm2_mq_t mq, psm2_epaddr_t from, int expected)
{
  psm2_mq_tag_t tag = { { 0 } };
  psm2_mq_req_t req;
  psm2_mq_status2_t status;
  int value = -1;
  must (psm2_mq_irecv2 (mq, from, &tag, &tag, 0, &value, sizeof value, NULL, &req) == PSM2_OK
            && psm2_mq_wait2 (&req, &status) == PSM2_OK && status.error_code == PSM2_OK
            && value == expected,
        "a message is lost, or is another");
}

static int process (int rank, int count, int active)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  psm2_uuid_t key = { 13 };
  struct psm2_ep_open_opts opts;
  psm2_ep_t ep;
  psm2_mq_t mq;
  psm2_error_t errors[RANKS];
  psm2_epaddr_t peers[RANKS];
  psm2_mq_tag_t tag = { { 0 } };
  psm2_am_handler_2_fn_t function = handle;
  void *none = NULL;
  int index;
  static char bytes[4096];
  psm2_error_register_handler (NULL, handler);
  must (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK
            && psm2_ep_open (key, &opts, &ep, &shared->ids[rank]) == PSM2_OK
            && psm2_mq_init (ep, 0, NULL, 0, &mq) == PSM2_OK,
        "open");
  must (active == 0 || psm2_am_register_handlers_2 (ep, &function, 1, &none, &index) == PSM2_OK,
        "register");
  atomic_fetch_add (&shared->opened, 1);
  wait_for (&shared->opened, RANKS);
  must (psm2_ep_connect (ep, RANKS, shared->ids, NULL, errors, peers, 20000000000) == PSM2_OK,
        "connect");
  atomic_fetch_add (&shared->connected, 1);
  while (atomic_load (&shared->connected) < RANKS)
    psm2_poll (ep);
  /* The late process answers each message. The answer also acknowledges the message. */
  for (int peer = 0; rank == LATE && peer < LATE; peer++)
    {
      receive (mq, peers[peer], peer);
      must (psm2_mq_send2 (mq, peers[peer], 0, &tag, &rank, sizeof rank) == PSM2_OK, "answer");
    }
  if (rank != LATE)
    {
      must (psm2_mq_send2 (mq, peers[LATE], 0, &tag, &rank, sizeof rank) == PSM2_OK, "send");
      receive (mq, peers[LATE], LATE);
    }
  if (rank != LATE)
    {
      for (int at = 0; at < count; at++)
        must (psm2_mq_send2 (mq, peers[LATE], 0, &tag, &at, sizeof at) == PSM2_OK,
              "send before the close");
      for (int at = 0; at < active; at++)
        must (psm2_am_request_short (peers[LATE], index, NULL, 0, bytes, sizeof bytes,
                                     PSM2_AM_FLAG_NOREPLY, NULL, NULL)
                  == PSM2_OK,
              "request before the close");
      atomic_fetch_add (&shared->sent, 1);
    }
  else if (count == 0)
    wait_for (&shared->closed, RANKS - 1);
  else
    {
      wait_for (&shared->sent, RANKS - 1);
      usleep (3 * TIMEOUT_NS / 1000);
      while (handled < LATE * active)
        psm2_poll (ep);
      for (int peer = 0; peer < LATE; peer++)
        for (int at = 0; at < count; at++)
          receive (mq, peers[peer], at);
    }
  must (psm2_mq_finalize (mq) == PSM2_OK, "finalize");
  psm2_error_t error = psm2_ep_close (ep, PSM2_EP_CLOSE_GRACEFUL, TIMEOUT_NS);
  atomic_fetch_add (&shared->closed, 1);
  must (error == PSM2_OK, "close");
  must (heard == 0, "an error was reported");
  return psm2_finalize ();
}

int main (void)
{
  /* The senders keep most of these messages until they are received. */
  static const int counts[] = { 0, 100, 100 };
  int failed = 0;
  /* As Open MPI sets it for processes on one host. */
  setenv ("PSM2_DEVICES", "self,shm", 1);
  for (int at = 0; at < 3; at++)
    {
      shared =
          mmap (NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
      if (shared == MAP_FAILED)
        return perror ("mmap"), 1;
      for (int rank = 0; rank < RANKS; rank++)
        if (fork () == 0)
          _exit (process (rank, counts[at], at == 2 ? ACTIVE : 0));
      for (int status; wait (&status) > 0;)
        failed |= status;
    }
  return failed != 0;
}
